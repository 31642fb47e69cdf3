"""The cache of generate(): the states of the layers' mixers, passed on from token to token.

torch.save adds a fingerprint of the whole model that read the tokens, embeddings included. torch.load restores the
cache, also with weights_only=True and in another process, for a model with the same weights.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from femixer.layout import Past
from femixer.state import State, check_made_by, fingerprint, owner_of
from femixer.trees import register


class FEMCache(Cache):
    """One streaming state per layer. States are values, so a copy of a cache continues independently of it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State | None] = [None] * layers
        # The number of the model that reads with it, or its fingerprint in a cache that was loaded.
        self.owner: int | str | None = None

    def belong_to(self, model: Any, number: int) -> None:
        """Raise a ValueError if another model has read with this cache, or if this one would read with it twice."""
        if model.training and torch.is_grad_enabled() and model.is_gradient_checkpointing:
            raise ValueError(
                "past_key_values and use_cache=True are not allowed where gradients are checkpointed: blocks would be "
                "computed again from later states; choose model.eval() or gradient_checkpointing_disable()"
            )
        if self.owner == number:
            return
        if isinstance(self.owner, str):
            check_made_by(self.owner, model, "past_key_values")
        elif self.owner is not None:
            raise ValueError("past_key_values belongs to another model; allowed is a cache that this one has filled")
        self.owner = number

    def __getstate__(self) -> dict[str, Any]:
        owner = self.owner
        if isinstance(owner, int):
            model = owner_of(owner)
            if model is None:
                raise ValueError("the model of this cache is gone; save a cache while its model is there")
            owner = fingerprint(model)
        return {"states": self.states, "owner": owner}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        FEMCache.__init__(self, len(saved["states"]))
        self.states, self.owner = saved["states"], saved["owner"]

    def __deepcopy__(self, memo: dict[int, Any]) -> FEMCache:
        copied = copy.copy(self)
        copied.states = copy.deepcopy(self.states, memo)
        return copied

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"FEMCache({len(self)} layers, {self.get_seq_length()} tokens)"

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.states[0] is not None

    @property
    def past(self) -> Past:
        """The layout of the tokens seen."""
        state = self.states[0]
        return Past() if state is None else state.past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        state = self.states[layer_idx]
        return 0 if state is None else state.past.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.states = [None if state is None else state.rows(beam_idx.to(state.device)) for state in self.states]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (first := self.states[0]) is not None:
            self.reorder_cache(torch.arange(first.batch, device=first.device).repeat_interleave(repeats))

    def reset(self) -> None:
        self.states, self.owner = [None] * len(self), None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self._refuse("crop")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("update")

    def _refuse(self, method: str) -> NoReturn:
        raise RuntimeError(
            f"FEMCache.{method}: a cache of streaming states cannot give back tokens or take keys; keep a copy "
            "(copy.copy) from before those tokens and go on from that"
        )

    def __copy__(self) -> FEMCache:
        return _cache([*self.states], self.owner)


def _cache(states: list[Any], owner: Any) -> FEMCache:
    cache = FEMCache(len(states))
    cache.states, cache.owner = states, owner
    return cache


def past_of(past_key_values: FEMCache | None) -> Past:
    if past_key_values is None:
        return Past()
    if not isinstance(past_key_values, FEMCache):
        raise TypeError(f"past_key_values must be an FEMCache, not {type(past_key_values).__name__}")
    return past_key_values.past


register(FEMCache, lambda cache: ({f"layer{i}": state for i, state in enumerate(cache.states)}, cache.owner), _cache)
torch.serialization.add_safe_globals([FEMCache])


class FEMGeneration(GenerationMixin):
    """GenerationMixin with an FEMCache, made before the prompt is read so that it can be read in chunks."""

    config: Any

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() would hand in keys and values

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not allowed; choose None: states of mixers are no keys and values, "
                "which alone can be kept in place, on another device or quantized"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FEMCache(self.config.num_hidden_layers)

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        """inputs_embeds: named, because generate() looks for it here. tokenizer: generate() reads it for its stop
        strings, and hands it on."""
        return super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]

    def _prefill(
        self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """generate() cuts off what the cache has read. Where that is all there is, it would read the same again."""
        cache, embeds, mask = (model_kwargs.get(x) for x in ("past_key_values", "inputs_embeds", "attention_mask"))
        name, given = ("input_ids", input_ids) if embeds is None else ("inputs_embeds", embeds)
        # New tokens may come alone, with the mask of all; generate() keeps the length of one that hides nothing.
        whole = getattr(generation_config, "_mask_length", given.shape[1]) if mask is None else mask.shape[1]
        seen = 0 if cache is None else cache.get_seq_length()
        if seen and whole <= seen:
            raise ValueError(
                f"{name} has {whole} tokens and past_key_values has read {seen}; allowed are more: all that it has "
                "read, and what follows"
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def _no_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "continuous batching needs keys and values in pages, which these models do not have; "
            "use generate() with a left-padded batch and its attention_mask"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch = _no_continuous_batching
