"""How fast generate() of a language model goes on after a context, and how large its cache is."""

from __future__ import annotations

import copy
import statistics
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from femixer.bench.memory import held_bytes
from femixer.models import FEMCache


class Clock(BaseStreamer):
    """Notes when generate() hands out the prompt and then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())  # the tokens come from the device, which has therefore finished them

    def end(self) -> None:
        pass

    def seconds_per_token(self) -> float:
        """The median; the first token does not count, before which generate() prepares itself."""
        _, *tokens = self.times
        return statistics.median(after - before for before, after in pairwise(tokens))


class Generator(NamedTuple):
    """A model and its cache of all `tokens` [B, context + 1] but the last; each sample goes on from a copy of it.

    cache_bytes: of one sequence, after the context; grows: whether the last token of the context made it larger.
    """

    model: Any
    cache: Any
    tokens: Tensor
    steps: int
    cache_bytes: float
    grows: bool

    @classmethod
    @torch.no_grad()  # as generate() does: what is made in inference mode could only be copied there
    def after(cls, model: Any, tokens: Tensor, steps: int) -> Generator:
        """tokens [B, context + 1]; steps: tokens of a sample."""
        context = tokens.shape[1] - 1
        before = model(tokens[:, : context - 1], use_cache=True, logits_to_keep=1).past_key_values
        size = cache_bytes(before)
        # A cache may get room to grow with its first new token, which therefore costs more than the others.
        cache = model(tokens[:, context - 1 : context], past_key_values=before, use_cache=True).past_key_values
        return cls(model, cache, tokens, steps, cache_bytes(cache) / len(tokens), cache_bytes(cache) > size)

    def time(self) -> float:
        """Seconds for a token of every sequence."""
        clock, cache = Clock(), copy.deepcopy(self.cache)
        self.model.generate(
            self.tokens,
            attention_mask=torch.ones_like(self.tokens),
            past_key_values=cache,
            max_new_tokens=self.steps + 1,
            do_sample=False,
            use_cache=True,
            streamer=clock,
        )
        return clock.seconds_per_token()


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, FEMCache):
        return held_bytes(cache.states)
    return held_bytes([(layer.keys, layer.values) for layer in cache.layers])
