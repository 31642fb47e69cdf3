"""How fast a model trains: forward, backward and a step of AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.bench.lm.models import Contestant, trained
from femixer.bench.lm.options import Options
from femixer.bench.lm.report import Speed, TrainingCost
from femixer.bench.measure import race, unlimited_compilation
from femixer.bench.mixers import ATTENTION
from femixer.bench.progress import progress
from femixer.bench.training import Training


class Trainer(Training):
    """A language model that learns tokens [B, T]."""

    @classmethod
    def of(cls, contestant: Contestant, tokens: Tensor, options: Options) -> Trainer:
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return cls.start(contestant.build(options), batch, options.compile)


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
