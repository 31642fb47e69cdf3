"""The training loop of all experiments."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from femixer.options import check
from femixer.training import checkpoint, distributed
from femixer.training.checkpoint import Position
from femixer.training.distributed import Part
from femixer.training.engine import Engine, EngineOptions
from femixer.training.interrupt import Interrupted, StopRequest
from femixer.training.journal import journal
from femixer.training.optimizer import Schedule, constant
from femixer.training.results import CHECKPOINTS, Record, Results
from femixer.training.seeding import derive

Batch = TypeVar("Batch")


def train(
    model: nn.Module,
    optimizer: Callable[[nn.Module], Optimizer],
    *,
    batch: Callable[[int, Part], Batch],
    losses: Callable[[Any, Batch], Mapping[str, Tensor]],
    items: Callable[[Batch], int],
    evaluate: Callable[[Any], Iterable[Record]],
    results: Results,
    steps: int,
    evaluate_every: int,
    seed: int,
    schedule: Schedule = constant,
    clip: float | None = None,
    samples: Callable[[Any], Iterable[Record]] | None = None,
    log_every: int | None = None,
    tokens: int | None = None,
    engine: EngineOptions | None = None,
    blocks: Sequence[str] | None = None,
    enough: Callable[[Sequence[Record]], bool] | None = None,
) -> None:
    """Minimise the mean loss for `steps` steps, from the newest checkpoint in `results` if there is one.

    optimizer: model -> optimizer, called when the parameters are where they stay.
    batch:     (step, part) -> one part of the global batch of a step, a pure function of both, so that a resumed run
               sees what it would have seen, and several processes what one would.
    losses:    (model, part) -> named scalars, each the *sum* of a loss over the items of the part.
    items:     part -> how many those are (sequences, scored tokens, ...). Minimised is the sum of all losses of all
               parts / the items of all parts: the mean over the global batch, however it is divided.
    evaluate:  model -> records, run without gradients in evaluation mode at step 0, every `evaluate_every` steps and
               at the end. Records get `step` and `seconds` and go to metrics.jsonl; then a checkpoint is saved.
    seed:      of whatever the model itself draws (dropout, samples), anew for every step for the same reason.
    schedule:  step -> factor of the optimizer's learning rates.
    clip:      largest norm of all gradients together.
    samples:   model -> records of text, after every evaluation, for samples.jsonl.
    log_every: steps between two training records in metrics.jsonl.
    tokens:    in one global batch, to show tokens per second.
    blocks:    class names of what is sharded one by one, by default the model's `_no_split_modules`.
    enough:    the records of one evaluation -> whether training may end there.

    In several processes each calls this with the same arguments and the same initial weights. `evaluate` and `samples`
    run in all of them (`distributed.part` and `distributed.total` divide the work); the main one's records count.

    A run that was stopped, even by kill -9, and resumed with the same options ends with the same weights and records.
    Ctrl-C and SIGTERM, in any process, finish the step, save it and raise `Interrupted` in all of them.
    """
    check(steps > 0, "steps", steps, "a whole number above 0")
    check(evaluate_every > 0, "evaluate_every", evaluate_every, "a whole number above 0")
    check(log_every is None or log_every > 0, "log_every", log_every, "a whole number above 0")
    check(clip is None or clip > 0, "clip", clip, "a number above 0")
    run, checkpoints = results.run, results.folder / CHECKPOINTS
    training = Training(model, optimizer, Engine(model, engine or EngineOptions(), blocks), losses, items, seed)
    position = checkpoint.restore(checkpoints, model, training.optimizer)
    results.rewind(position.step if position.step > 0 else -1)

    with StopRequest() as stop, journal(results, position.step, steps, position.seconds, tokens) as told:

        def record(step: int) -> bool:
            records, texts = training.evaluated(step, evaluate, samples or (lambda model: ()))
            told.evaluated(step, records, texts)
            return enough is not None and enough(records)

        if position.step == 0:
            ended = record(0)
        else:
            last = [r for r in results.metrics() if r["step"] == position.step and r.get("split") != "train"]
            ended = enough is not None and bool(last) and enough(last)
        model.train()
        for step in range(position.step + 1, steps + 1):
            if ended:
                break
            due = step % evaluate_every == 0 or step == steps
            saved = due or (run.save_every is not None and step % run.save_every == 0)
            logged = log_every is not None and step % log_every == 0
            with told.step(step, training.own_losses):
                factor = schedule(step)
                pieces = [batch(step, part) for part in training.engine.parts]
                stopping = training.step(step, pieces, factor, clip, stop, measure=logged or saved)
            if logged or saved or stopping:
                means = training.mean_losses()  # raises if they are not finite: such weights replace no good ones
                if logged:
                    told.trained(step, means, training.rates[0] * factor, float(training.norm))
            if due:
                ended = record(step)
            if (saved or stopping) and run.keep > 0:
                checkpoint.save(checkpoints, model, training.optimizer, Position(step, told.seconds()), run.keep)
            if stopping:
                raise Interrupted(step, steps, saved=run.keep > 0)


class Training:
    """A model, its optimizer, and the last step that was taken."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        engine: Engine,
        losses: Callable[[Any, Any], Mapping[str, Tensor]],
        items: Callable[[Any], int],
        seed: int,
    ) -> None:
        self.model, self.engine, self.losses, self.items, self.seed = model, engine, losses, items, seed
        self.optimizer = optimizer(model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.sums: dict[str, Tensor] = {}
        self.own, self.all = 0.0, 0.0
        self.norm: Tensor | float = 0.0
        self.taken = 0

    def step(
        self, step: int, pieces: Sequence[Any], factor: float, clip: float | None, stop: StopRequest, measure: bool
    ) -> bool:
        """Take one step on the pieces of this process and those of all others. Returns whether it shall be the last."""
        self.taken = step
        self.own = sum(self.items(piece) for piece in pieces)
        # One exchange for both: the number of items must be known before the gradients are, and a request to stop
        # must be known to all before anyone goes on.
        self.all, requests = distributed.total(self.own, stop.requested)
        check(self.all > 0, "items", self.all, f"a batch that has any (step {step})")
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        seeds = [derive(self.seed, "step", step, part.index) for part in self.engine.parts]
        self.sums = self.engine.backward(pieces, self.losses, 1 / self.all, seeds)
        if clip is not None or measure:
            self.norm = self.engine.clip(clip)
        self.optimizer.step()
        return stop.requested if distributed.world() == 1 else requests > 0

    def own_losses(self) -> dict[str, Tensor]:
        """The mean of each loss over this process's items: no other has to be asked."""
        return {name: value / max(self.own, 1) for name, value in self.sums.items()}

    def mean_losses(self) -> dict[str, float]:
        """The mean of each loss over the global batch; a FloatingPointError if they or the gradients are not finite."""
        sums = distributed.total(*(value.item() for value in self.sums.values()))
        for name, value in (("loss", sum(sums) / self.all), ("norm of the gradients", float(self.norm))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {name} is {value} at step {self.taken}; a smaller learning rate may help"
                )
        return {name: value / self.all for name, value in zip(self.sums, sums, strict=True)}

    def evaluated(self, step: int, *questions: Callable[[Any], Iterable[Record]]) -> list[list[Record]]:
        """What the model answers to each question."""
        self.model.eval()
        torch.manual_seed(derive(self.seed, "evaluation", step))
        with torch.no_grad(), self.engine.autocast():
            answers = [[*question(self.model)] for question in questions]
        self.model.train()
        return answers
