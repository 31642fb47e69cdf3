"""The language model: token embeddings, blocks, a norm and the output projection; and other heads: classes of a
sequence, classes of its tokens, and masked tokens (BERT-style)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from femixer.layout import Past
from femixer.models.block import FEMBlock, RMSNorm, build_mixer
from femixer.models.cache import FEMCache, FEMGeneration, past_of
from femixer.models.config import FEMConfig
from femixer.models.files import Card, check_whole, load_all, mapped, write_beside
from femixer.state import new_number


class FEMPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialization."""

    config_class = FEMConfig
    base_model_prefix = "model"
    is_body = False  # of a model with a head
    card: Card | None = None  # what the model card says besides what the configuration tells
    supports_gradient_checkpointing = True
    _no_split_modules = ["FEMBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": FEMBlock}  # noqa: RUF012
    _can_compile_fullgraph = True
    # Streams cannot be cut back to an earlier token, which assisted generation would need.
    _is_stateful = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        allow_missing: bool | Sequence[str] = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but from safetensors only (a pickle could run any code), and only if the weights are
        complete, of the right shapes and finite. allow_missing: True, or patterns of names that may start anew."""
        load = functools.partial(super().from_pretrained, *args)
        divided = any(kwargs.get(name) is not None for name in ("distributed_config", "tp_plan", "tp_size"))
        if divided:
            from femixer.models.over_ranks import divide_mixers, register_heads

            register_heads()
        model, info = load_all(load, pretrained_model_name_or_path, cls, allow_missing, kwargs)
        if divided:
            divide_mixers(model)
        return (model, info) if output_loading_info else model

    def cut_sequence(self, cut: Any) -> None:
        """From now on each rank of a `femixer.parallel` cut computes its part of the tokens."""
        from femixer.models.over_ranks import cut_model

        cut_model(self, cut)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would copy this file to where a model is saved, without the package it is a part of."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """As in transformers. Beside the weights it writes a module by which tools that never import femixer find the
        class, and a model card (README.md, from `self.card`), unless there is one that we did not write."""
        if kwargs.get("state_dict") is None:
            check_whole(self)
        if is_main_process:
            write_beside(self, save_directory)
        with mapped(self.config):
            super().save_pretrained(save_directory, is_main_process, **kwargs)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside of transformers it would pass over modules that own no parameter but only other modules.
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if reset is None or not type(module).__module__.startswith("femixer."):
            super()._init_weights(module)
            return
        # Our modules know how they start, but not that some of their parameters have just been loaded.
        loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        if len(loaded) == len([*module.parameters()]):
            return
        kept = [p.clone() for p in loaded]
        reset()
        for parameter, value in zip(loaded, kept, strict=True):
            parameter.copy_(value)


class FEMModel(FEMPreTrainedModel):
    """input_ids [B, T] -> hidden states [B, T, hidden_size]."""

    is_body = True

    def __init__(self, config: FEMConfig) -> None:
        super().__init__(config)
        dim, eps, width = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        assert width is not None  # the configuration fills it in
        self.embed_tokens = nn.Embedding(config.vocab_size, dim, config.pad_token_id)
        self.layers = nn.ModuleList(
            FEMBlock(dim, build_mixer(config, layer), width, eps, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(dim, eps=eps)
        self._owner = new_number(self)
        self.post_init()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled model is another one: it does not take the original's caches."""
        super().__setstate__(state)
        self._owner = new_number(self)

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        past_key_values: FEMCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """attention_mask [B, past + T] or [B, T]: 0 is padding, anywhere. segments int [B, T]: packed documents; a
        change of id starts one, negative is padding. Positions follow from these two. The arguments that collators of
        packed documents pass (position_ids, seq_idx, cu_seq_lens_q) are read as segments: see `packed_segments`."""
        check_arguments(kwargs, PACKING)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        past = past_of(past_key_values)
        if not self.config.causal and (use_cache or past_key_values is not None):
            raise ValueError("use_cache and past_key_values need causal=True; this model is an encoder")
        if use_cache is None:
            use_cache = self.config.use_cache and self.config.causal and not self.training
        if use_cache and past_key_values is None:
            past_key_values = FEMCache(len(self.layers))
        if past_key_values is not None:
            past_key_values.belong_to(self, self._owner)
        mask = padding_mask(attention_mask, x, past.seen)
        segments = packed_segments(x, segments, mask, kwargs, past)
        mask = mask if segments is None else None
        for layer in self.layers:
            x = layer(x, mask=mask, segments=segments, cache=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class FEMForCausalLM(FEMPreTrainedModel, FEMGeneration, GenerationMixin):  # transformers looks for the last by name
    """FEMModel with logits of the next token, a loss and generate()."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: FEMConfig) -> None:
        if not config.causal:
            raise ValueError("causal=False is not allowed in FEMForCausalLM; choose True, or FEMForMaskedLM")
        super().__init__(config)
        self.model = FEMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        past_key_values: FEMCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """labels [B, T]: the tokens themselves (they are shifted here), -100 where there is no target. Padding is not
        scored, nor is, with segments, the prediction of the next document's first token. shift_labels [B, T], instead
        of labels or beside them: the target of each token, already shifted. logits_to_keep: logits of that many last
        positions only (0: of all). The rest is as in FEMModel."""
        for_loss = taken_for_loss(kwargs)
        if labels is not None:
            rows = input_ids if inputs_embeds is None else inputs_embeds
            assert rows is not None
            past = past_of(past_key_values)
            mask = padding_mask(attention_mask, rows, past.seen)
            segments = packed_segments(rows, segments, mask, kwargs, past)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            segments=segments,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None or for_loss.get("shift_labels") is not None:
            labels = labels if labels is None or segments is None else within_documents(labels, segments)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )


def within_documents(labels: Tensor, segments: Tensor) -> Tensor:
    """labels [B, T], -100 where the token before is not of the same document, or where one of the two is padding."""
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return torch.cat([labels[:, :1], labels[:, 1:].masked_fill(~follows, -100)], 1)


def padding_mask(attention_mask: Tensor | None, x: Tensor, seen: int = 0) -> Tensor | None:
    """bool [B, T] of the tokens x, which follow `seen` others; None where none is padding: that path is faster."""
    if attention_mask is None:
        return None
    batch, length = x.shape[:2]
    sizes = [*attention_mask.shape]  # compared one by one: a set would make constants of a compiler's sizes
    if sizes != [batch, length] and sizes != [batch, seen + length]:
        allowed = f"({batch}, {length})" + (f" or ({batch}, {seen + length})" if seen else "")
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}; allowed is {allowed}: one entry per token, 0 for padding")
    given = attention_mask[:, attention_mask.shape[1] - length :]
    mask = given.bool()
    if torch.compiler.is_compiling():
        return mask
    fits, whole = torch.stack([(given == mask).all(), mask.all()]).tolist()  # one question to the device
    if not fits:
        value = given[given != mask][0].item()
        raise ValueError(f"attention_mask has the value {value}; allowed are 0 and 1; packed documents go to segments")
    return None if whole else mask


class _WithHead(FEMPreTrainedModel):
    """A body whose head may be new: only that may be missing in a folder of weights (see femixer.models.files)."""

    new_head: tuple[str, ...] = ("score",)
    output: Any
    packs = True  # a row may hold several documents
    for_loss: tuple[str, ...] = ("num_items_in_batch",)  # what the loss reads of the arguments

    def __init__(self, config: FEMConfig) -> None:
        super().__init__(config)
        self.model = FEMModel(config)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """labels, with which there is a loss: as the class says. The rest is as in FEMModel."""
        if not self.packs and kwargs.get("segments") is not None:
            raise ValueError("segments is not allowed: a row is one sequence, which has one class")
        for_loss = taken_for_loss(kwargs, self.for_loss)
        # A head reads whole sequences, so nothing is kept of them.
        if kwargs.pop("use_cache", None):
            raise ValueError(f"use_cache=True is not allowed; {type(self).__name__} reads whole sequences")
        if input_ids is not None and input_ids.shape[1] and attention_mask is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs = self.model(**given, use_cache=False, **kwargs)
        logits = self.logits(outputs.last_hidden_state, input_ids, attention_mask)
        loss = None if labels is None else self.loss(logits, labels, for_loss)
        return self.output(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """hidden [B, T, hidden_size] -> logits of what the labels are."""
        raise TypeError(f"{type(self).__name__} must define logits()")

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(logits=logits, labels=labels, config=self.config, **for_loss)


class _Classifier(_WithHead):
    def __init__(self, config: FEMConfig) -> None:
        super().__init__(config)
        classes = config.num_labels
        assert classes is not None  # transformers fills it in
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size, classes)
        self.post_init()


class FEMForSequenceClassification(_Classifier):
    """FEMModel with logits of a sequence's classes, from its last token if causal, from the mean of all if not.

    attention_mask [B, T]: 0 is padding, anywhere; without it a causal model uses the last token that is not
    config.pad_token_id. labels: a class per sequence [B], or numbers [B] or [B, num_labels]; the loss is that of
    config.problem_type, which follows from the labels if it is None.
    """

    output = SequenceClassifierOutput
    accepts_loss_kwargs = False  # the loss is a mean over sequences: Trainer divides it by the steps it accumulates
    packs, for_loss = False, ()

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        real, padding = attention_mask, self.config.pad_token_id
        if real is None and self.config.causal and input_ids is not None and padding is not None:
            real = input_ids != padding
        return self.score(self.dropout(self.pooled(hidden, real)))

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config)

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[B, T, hidden_size] -> [B, hidden_size]: of the last real token, or the mean of the real ones."""
        if not hidden.shape[1]:
            raise ValueError("input_ids has no tokens; allowed is at least one")
        mask = padding_mask(attention_mask, hidden)
        if mask is None:
            return hidden[:, -1] if self.config.causal else hidden.mean(1)
        if self.config.causal:
            place = torch.arange(hidden.shape[1], device=hidden.device).masked_fill(~mask, 0).amax(1)
            return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        total = hidden.masked_fill(~mask[..., None], 0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp_min(1)


class FEMForTokenClassification(_Classifier):
    """FEMModel with logits of every token's classes [B, T, num_labels].

    labels [B, T]: -100 where nothing is to be learned.
    """

    output = TokenClassifierOutput

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        return self.score(self.dropout(hidden))


class FEMForMaskedLM(_WithHead):
    """FEMModel as encoder with logits of the tokens that were masked.

    labels [B, T]: the tokens that were masked, -100 at all others.
    """

    output = MaskedLMOutput
    new_head = ("lm_head",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FEMConfig) -> None:
        if config.causal:
            raise ValueError(
                "causal=True is not allowed in FEMForMaskedLM; choose False: it reads both sides of a mask"
            )
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        return self.lm_head(hidden)

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)


# What collators of packed documents pass on. The greatest lengths follow from the others.
PACKING = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# What transformers itself reads in the decorators of `forward`, and places that follow from the cache.
SERVED_ELSEWHERE = ("return_dict", "output_hidden_states", "cache_position")
# What its losses read.
OF_THE_LOSS = ("num_items_in_batch", "shift_labels")


def check_arguments(given: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    """Raise a TypeError that names an argument of `forward` that would be ignored; known: what the model reads."""
    for name, value in given.items():
        if name in known or name in SERVED_ELSEWHERE or value is None or value is False:
            continue
        if name == "output_attentions":
            raise TypeError(
                "output_attentions=True is not allowed: weights differ per channel and are never stored; "
                "mixer.inspect(x) or femixer.inspection computes them"
            )
        raise TypeError(f"{name} is not an argument of this model and would be ignored")


def taken_for_loss(given: dict[str, Any], names: tuple[str, ...] = OF_THE_LOSS) -> dict[str, Any]:
    """The arguments of `forward` that only the loss reads, taken out of the others."""
    return {name: given.pop(name) for name in names if name in given}


def packed_segments(
    x: Tensor, segments: Tensor | None, mask: Tensor | None, given: dict[str, Any], past: Past
) -> Tensor | None:
    """Segments int [B, T] of the tokens x [B, T, ...] from what collators give: seq_idx [B, T], numbers of the
    documents; cu_seq_lens_q [n + 1], where they begin in one row; position_ids [B, T], which begin again at zero.

    mask bool [B, T]: False is padding, which is negative in the result. past: of the tokens before x, whose last
    document goes on until another begins. None where x begins no other document.
    """
    batch, length = x.shape[:2]
    last = 0 if past.identity is None else past.identity.clamp_min(0)[:, None]
    found = {"segments": segments} if segments is not None else {}
    if (numbers := given.get("seq_idx")) is not None:
        found["seq_idx"] = _checked("seq_idx", numbers, batch, length)
    if (ends := given.get("cu_seq_lens_q")) is not None:
        found["cu_seq_lens_q"] = last + 1 + _of_lengths(ends, given.get("cu_seq_lens_k"), batch, length)
    else:
        for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            if given.get(name) is not None:
                raise ValueError(f"{name} was given without cu_seq_lens_q, which says where documents begin")
    if (positions := given.get("position_ids")) is not None:
        positions = _checked("position_ids", positions, batch, length)
        starts = positions == 0 if mask is None else (positions == 0) & mask
        if not torch.compiler.is_compiling():
            _check_positions(positions, mask, past.seen)
        found["position_ids"] = last + starts.cumsum(1)
    if not found:
        return None
    (name, first), *others = found.items()
    if not torch.compiler.is_compiling():
        for other, ids in others:
            if not torch.equal(_borders(first, mask), _borders(ids, mask)):
                raise ValueError(f"{other} and {name} begin documents at different tokens")
        if name == "position_ids" and not bool((starts.sum(1) > int(past.seen == 0)).any()):
            return None  # one document: the path without segments is faster
    return first if mask is None else first.masked_fill(~mask, -1)


def _checked(name: str, ids: Tensor, batch: int, length: int) -> Tensor:
    if ids.dim() != 2 or ids.shape[1] != length or ids.shape[0] not in (1, batch):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; allowed is {(batch, length)}")
    return ids.expand(batch, -1).long()


def _of_lengths(ends: Tensor, of_keys: Tensor | None, batch: int, length: int) -> Tensor:
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q needs one row of packed documents, not {batch}")
    if of_keys is not None and not torch.compiler.is_compiling() and not torch.equal(ends, of_keys):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; a document's tokens read that document")
    if not torch.compiler.is_compiling():
        rising = bool((ends.diff() >= 0).all())
        if not rising or int(ends[0]) != 0 or int(ends[-1]) != length:
            raise ValueError(f"cu_seq_lens_q={ends.tolist()} must rise from 0 to the number of tokens, {length}")
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:].contiguous(), right=True)[None]


def _borders(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Where a real token is of another document than the one before."""
    changed = ids[:, 1:] != ids[:, :-1]
    return changed if mask is None else changed & mask[:, 1:] & mask[:, :-1]


def _check_positions(positions: Tensor, mask: Tensor | None, seen: int) -> None:
    """Positions count the real tokens of a document; what they say besides where documents begin cannot be used."""
    before, after = positions[:, :-1], positions[:, 1:]
    odd = (after != before + 1) & (after != 0)
    first = (positions[:, :1] != 0) & (seen == 0)
    if mask is not None:
        odd, first = odd & mask[:, 1:] & mask[:, :-1], first & mask[:, :1]
    if bool(odd.any()) or bool(first.any()):
        raise ValueError(
            "position_ids must count the tokens of each document from 0, one by one; other positions cannot be given"
        )
