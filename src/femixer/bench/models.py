"""What the clock runs around in whole models: training steps, with their cost as JSON has it, and generation."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.generation.streamers import BaseStreamer

from femixer.bench.calls import held_bytes
from femixer.bench.measure import BenchOptions, Spread, Timing, stopwatch, timed
from femixer.bench.report import Report as BenchReport
from femixer.models import FEMCache
from femixer.models.named import parameters_of
from femixer.training.loop import adamw


class Training(NamedTuple):
    """A model that is trained while the clock runs.

    call: the model itself, or the model compiled; batch: its arguments, the same in every step; loss: of its output.
    """

    call: Callable[..., Any]
    optimizer: Optimizer
    batch: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    parameters: int
    device: torch.device

    @classmethod
    def start(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        compiled: bool = False,
        loss: Callable[[Any], Tensor] = lambda output: output.loss,
    ) -> Training:
        call = torch.compile(model.train(), dynamic=False) if compiled else model.train()
        device = next(model.parameters()).device
        return cls(call, adamw(model, learning_rate=1e-4, fused=True), batch, loss, parameters_of(model), device)

    def step(self) -> None:
        """Forward, backward and a step of AdamW."""
        self.loss(self.call(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self) -> float:
        return stopwatch(self.step, self.device)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step, and their ratio to the rival's of the same round.

    name: as the table shows it; key: as it was asked for. samples: seconds, one per round.
    """

    name: str
    key: str
    parameters: int
    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, name: str, key: str, parameters: int, samples: Sequence[float], rival: Sequence[float]) -> StepCost:
        return cls(name, key, parameters, **vars(Timing.of(samples, rival)))


@dataclass(frozen=True)
class Report(BenchReport):
    training: list[StepCost]


def race_of_steps(
    field: Mapping[str, Training], name: Callable[[str], str], rival: str, options: BenchOptions
) -> dict[str, Sequence[Any]]:
    """The models by key, one step each in every round; name: what the table calls a key."""
    seconds = timed("training", {key: training.time for key, training in field.items()}, options)
    costs = [
        StepCost.of(name(key), key, training.parameters, seconds[key], seconds[rival])
        for key, training in field.items()
    ]
    return {"training": costs}


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
