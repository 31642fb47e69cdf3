"""How fast a model trains: forward, backward and a step of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from femixer.bench.lm.models import Contestant, trained
from femixer.bench.lm.options import Options
from femixer.bench.lm.report import Speed, TrainingCost
from femixer.bench.measure import race, stopwatch, unlimited_compilation
from femixer.bench.mixers import ATTENTION
from femixer.bench.progress import progress
from femixer.training.optimizer import adamw


class Trainer(NamedTuple):
    """call: the model itself, or the model compiled; tokens [B, T]."""

    call: Callable[..., Any]
    optimizer: Optimizer
    tokens: Tensor
    parameters: int

    @classmethod
    def of(cls, contestant: Contestant, tokens: Tensor, options: Options) -> Trainer:
        model = contestant.build(options).train()
        call = torch.compile(model, dynamic=False) if options.compile else model
        return cls(call, adamw(model, learning_rate=1e-4), tokens, model.num_parameters())

    def step(self) -> None:
        self.call(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self) -> float:
        return stopwatch(self.step, self.tokens.device)


def measure_training(options: Options) -> list[TrainingCost]:
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    with unlimited_compilation(options.compile):
        field = {contestant: Trainer.of(contestant, tokens, options) for contestant in trained(options)}
        with progress("training", options.warmup + options.rounds) as advance:
            seconds = race({c: trainer.time for c, trainer in field.items()}, options.rounds, options.warmup, advance)
    rival = seconds[Contestant(ATTENTION)]
    return [
        TrainingCost(c.name(options.parts), c.prior, trainer.parameters, Speed.of(tokens.numel(), seconds[c], rival))
        for c, trainer in field.items()
    ]
