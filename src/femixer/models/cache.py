"""What generate() hands from token to token: the states of the layers' mixers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from femixer.state import State
from femixer.trees import register


class FEMCache(Cache):
    """One streaming state per layer. States are values, so copies of a cache can go on independently of it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State | None] = [None] * layers

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
        self.states = [None] * len(self)

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
        copied = FEMCache(len(self))
        copied.states = [*self.states]
        return copied


def _cache(states: list[Any], _: Any) -> FEMCache:
    cache = FEMCache(len(states))
    cache.states = states
    return cache


register(FEMCache, lambda cache: ({f"layer{i}": state for i, state in enumerate(cache.states)}, None), _cache)
