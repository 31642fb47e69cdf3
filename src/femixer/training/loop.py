"""The training loop of all experiments, its optimizer, and learning rates as functions of the step: 1, 2, ...; early
stopping, and the weights of the best evaluation, also across a crash."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from femixer.optional import require
from femixer.options import RATE, Count, Positive, check, check_options, check_positive
from femixer.training import atomic, checkpoint, distributed
from femixer.training.checkpoint import Position
from femixer.training.distributed import Interrupted, Part, stop_requests
from femixer.training.engine import Divide, Engine, EngineOptions, full_weights
from femixer.training.journal import Journal, journal
from femixer.training.results import CHECKPOINTS, Record, Results
from femixer.training.seeding import derive


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    fused: bool | None = None,
) -> AdamW:
    """AdamW that decays weight matrices only, embeddings among them.

    Biases, norms and bare parameters are left alone. That includes the inverse temperature: its parameter x in
    beta_max = softplus(x + 1.8) must grow to 10 and beyond where a channel wants its maximum, and there a decay of 0.01
    would pull back a tenth of a full step. Embeddings decay because a table that is tied to the output matrix is that
    matrix: tied or not, the same rule holds for both. fused: one call for all parameters, which models so small that
    calls cost more than numbers should have (2.7 against 0.6 ms for 30 matrices of 64 x 64); None is torch's choice.
    """
    check(RATE.fits(learning_rate), "learning_rate", learning_rate, RATE.allowed)
    check(weight_decay >= 0, "weight_decay", weight_decay, "a number of at least 0")
    check(all(0 <= beta < 1 for beta in betas), "betas", betas, "two numbers from 0 to below 1")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name, p in parameters.items() if name.split(".")[-1] == "weight" and p.ndim > 1}
    groups = [
        {"params": [p for name, p in parameters.items() if name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=fused)


Schedule = Callable[[int], float]


def constant(step: int) -> float:
    return 1.0


def cosine(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear rise to 1 at step `warmup`, then half a cosine down to `floor` at the last of `steps` steps."""
    check_positive(steps=steps)
    check(0 <= warmup <= steps, "warmup", warmup, f"between 0 and steps={steps}")
    check(0 <= floor <= 1, "floor", floor, "a fraction of the learning rate, between 0 and 1")

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        fallen = (step - warmup) / (steps - warmup)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(fallen, 1.0))) / 2

    return factor


START, END = 1 / 25, 1 / 250_000
"""Shares of the largest rate at the first and at the last step, torch's defaults."""


def one_cycle(steps: int, warmup: float = 0.05) -> Schedule:
    """Up from START to 1 in a share `warmup` of the steps and down to END, both linear.

    torch's OneCycleLR(pct_start=warmup, anneal_strategy="linear", cycle_momentum=False), as a function of the step.
    """
    check_positive(steps=steps)
    check(0 <= warmup <= 1, "warmup", warmup, "a share of the steps, between 0 and 1")
    peak = max(warmup * steps - 1, 0.0)

    def factor(step: int) -> float:
        at = step - 1
        if at <= peak:
            return START + (1 - START) * at / peak if peak else 1.0
        return 1 + (END - 1) * (at - peak) / (steps - 1 - peak)

    return factor


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Fit(Generic[Batch]):
    """A model, what it is trained on, and how it is evaluated."""

    model: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    """model -> optimizer, called once the parameters are on their device."""
    batch: Callable[[int, Part], Batch]
    """(step, part) -> one part of the global batch of a step; a pure function of both, so that a resumed run sees the
    same data, and several processes together what one would."""
    losses: Callable[[Any, Batch], Mapping[str, Tensor]]
    """(model, part) -> named scalars, each the *sum* of a loss over the items of the part."""
    items: Callable[[Batch], int]
    """part -> the number of its items (sequences, scored tokens, ...). The loop minimises the sum of the losses
    of all parts / the number of items of all parts: the mean over the global batch, however it is divided."""
    evaluate: Callable[[Any], Iterable[Record]]
    """model -> records, without gradients and in evaluation mode."""
    samples: Callable[[Any], Iterable[Record]] = lambda model: ()
    """model -> records of text, after every evaluation, for samples.jsonl."""
    enough: Callable[[Sequence[Record]], bool] = lambda records: False
    """The records of one evaluation -> whether training may end there."""
    divide: Divide | None = None
    """Divides the model over the processes of a mesh, where that is possible."""


@dataclass(frozen=True)
class TrainOptions:
    """How long and how a model is trained."""

    steps: Count
    evaluate_every: Count
    """Steps between two evaluations; there is one before the first step and one after the last, too."""
    seed: int
    """Of the model's own random numbers (dropout, samples), set at every step, so that resuming repeats them."""
    schedule: Schedule = constant
    """step -> factor of the optimizer's learning rates."""
    clip: Positive | None = None
    """Largest norm of all gradients together."""
    log_every: Count | None = None
    """Steps between two training records in metrics.jsonl."""
    tokens: int | None = None
    """Tokens of one global batch, to show tokens per second."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    blocks: Sequence[str] | None = None
    """Class names of the submodules that are sharded one by one, by default the model's `_no_split_modules`."""


def train(fit: Fit[Any], options: TrainOptions, results: Results) -> None:
    """Minimise the mean loss for `steps` steps, from the newest checkpoint in `results` if there is one.

    In several processes each calls this with the same arguments and the same initial weights. `evaluate` and `samples`
    run in all of them (`distributed.part` and `distributed.total` divide the work); the main one's records count.

    A run that was stopped, even by kill -9, and resumed with the same options ends with the same weights and records.
    Ctrl-C and SIGTERM, in any process, finish the step, save it and raise `Interrupted` in all of them.
    """
    check_options(options)
    run, checkpoints = results.run, results.folder / CHECKPOINTS
    training = Trainer(fit, options)
    position = checkpoint.restore(checkpoints, fit.model, training.optimizer)
    known = results.rewind(position.step if position.step > 0 else -1)
    distributed.on_main(lambda: results.check_records(position.records))

    with stop_requests() as stop, journal(results, position, known, options.steps, options.tokens) as told:
        ended = training.evaluate(0, told) if position.step == 0 else was_enough(fit, results, position.step)
        fit.model.train()
        for step in range(position.step + 1, options.steps + 1):
            if ended:
                break
            due = step % options.evaluate_every == 0 or step == options.steps
            saved = due or (run.save_every is not None and step % run.save_every == 0)
            logged = options.log_every is not None and step % options.log_every == 0
            with told.step(step, training.own_losses):
                stopping = training.step(step, stop, measure=logged or saved)
            if logged or saved or stopping:
                means = training.mean_losses()  # raises if they are not finite: such weights replace no good ones
                if logged:
                    told.trained(step, means, training.rate, float(training.norm))
            if due:
                ended = training.evaluate(step, told)
            if (saved or stopping) and run.keep > 0:
                at = Position(step, told.seconds(), results.checksum())
                checkpoint.save(checkpoints, fit.model, training.optimizer, at, run.keep)
            if stopping:
                kept = "saved" if run.keep > 0 else "not saved"
                raise Interrupted(f"stopped after step {step} of {options.steps}, which is {kept}")


def was_enough(fit: Fit[Any], results: Results, step: int) -> bool:
    """Whether training ended with the evaluation of a step, of which there may be none."""
    records = distributed.on_main(results.metrics)  # the others may see what was there before `rewind`
    last = [record for record in records if record["step"] == step and record.get("split") != "train"]
    return bool(last) and fit.enough(last)


class Trainer:
    """A model, its optimizer, and the last step that was taken."""

    def __init__(self, fit: Fit[Any], options: TrainOptions) -> None:
        self.fit, self.options = fit, options
        self.engine = Engine(fit.model, options.engine, options.blocks, fit.divide)
        self.optimizer = fit.optimizer(fit.model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.sums: dict[str, Tensor] = {}
        self.own, self.all = 0.0, 0.0
        self.norm: Tensor | float = 0.0
        self.taken = 0

    def step(self, step: int, stop: Event, measure: bool) -> bool:
        """Take one step on the pieces of this process and those of all others. Returns whether it shall be the last."""
        fit, clip = self.fit, self.options.clip
        factor = self.options.schedule(step)
        pieces = [fit.batch(step, part) for part in self.engine.parts]
        self.taken = step
        self.own = sum(fit.items(piece) for piece in pieces)
        # One exchange for both: the number of items must be known before the gradients are, and a request to stop
        # must be known to all before anyone goes on.
        self.all, requests = distributed.total(self.own, stop.is_set())
        check(self.all > 0, "items", self.all, f"a batch that has any (step {step})")
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        seeds = [derive(self.options.seed, "step", step, part.index) for part in self.engine.parts]
        self.sums = self.engine.backward(pieces, fit.losses, 1 / self.all, seeds)
        if clip is not None or measure:
            self.norm = self.engine.clip(clip)
        self.optimizer.step()
        return stop.is_set() if distributed.world() == 1 else requests > 0

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self.rates[0] * self.options.schedule(self.taken)

    def own_losses(self) -> dict[str, Tensor]:
        """The mean of each loss over this process's items: no other has to be asked."""
        return {name: value / max(self.own, 1) for name, value in self.sums.items()}

    def mean_losses(self) -> dict[str, float]:
        """The mean of each loss over the global batch; a FloatingPointError if they or the gradients are not finite."""
        sums = distributed.total(*(value.item() for value in self.sums.values()))
        for name, value in (("loss", sum(sums) / self.all), ("norm of the gradients", float(self.norm))):
            if not math.isfinite(value):
                told = f"the {name} is {value} at step {self.taken}"
                raise FloatingPointError(f"{told}; a smaller learning rate may help")
        return {name: value / self.all for name, value in zip(self.sums, sums, strict=True)}

    def evaluate(self, step: int, told: Journal) -> bool:
        """Evaluate and sample the model, record both, and say whether training may end."""
        fit, model = self.fit, self.fit.model
        model.eval()
        torch.manual_seed(derive(self.options.seed, "evaluation", step))
        with torch.no_grad(), self.engine.autocast():
            records, texts = [*fit.evaluate(model)], [*fit.samples(model)]
        model.train()
        told.evaluated(step, records, texts)
        return fit.enough(records)


Error = tuple[float, ...]
"""What is compared: the first number, the next where that is equal, and so on; lower is better."""


class Best:
    """Keeps the weights of the evaluation with the lowest error, the first of equals.

    Which that is, only metrics.jsonl says, whatever was interrupted in between. The weights are in
    checkpoints/best-STEP.safetensors before the checkpoint of their step is, and those of the best before stay as long
    as a resumed run may go back to them.
    """

    def __init__(
        self,
        model: nn.Module,
        results: Results,
        error: Callable[[Record], Error],
        patience: float = math.inf,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """error:    of a record of the validation split.
        patience: evaluations without a better one after which training ends.
        weights:  those to keep of the last evaluation, by default the model's; called in all processes.
        """
        self.model, self.results, self.error, self.patience = model, results, error, patience
        self.weights = weights or (lambda: full_weights(model))

    def enough(self, records: Sequence[Record]) -> bool:
        """Told after each evaluation: save the weights if it is the best, and say if it is time to stop."""
        scores = distributed.on_main(self.scores)
        best, last = lowest(scores), max(scores)
        if best == last:
            weights = self.weights()
            earlier = {step: value for step, value in scores.items() if step < last}
            keep = {best, lowest(earlier)} if earlier else {best}
            distributed.on_main(lambda: self._save(weights, best, keep))
        return sum(step > best for step in scores) >= self.patience

    def scores(self) -> dict[int, Error]:
        """step -> validation error."""
        return {r["step"]: self.error(r) for r in self.results.metrics() if r.get("split") == "validation"}

    def load(self) -> int:
        """Put the best weights into the model; the step they are from."""
        scores = distributed.on_main(self.scores)
        if not scores:
            raise FloatingPointError(f"out={str(self.results.folder)!r}: no evaluation is finite, not even the first")
        step = lowest(scores)
        self.model.load_state_dict(require("safetensors.torch", "cli").load_file(self._path(step)))
        return step

    def _save(self, weights: Mapping[str, Tensor], step: int, keep: set[int]) -> None:
        path, kept = self._path(step), {self._path(each) for each in keep}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as partial:
            require("safetensors.torch", "cli").save_file({k: v.contiguous() for k, v in weights.items()}, partial)
        for other in {*path.parent.glob("best-*.safetensors")} - kept:
            atomic.remove(other)

    def _path(self, step: int) -> Path:
        return self.results.folder / CHECKPOINTS / f"best-{step:08d}.safetensors"


def with_test(results: Results, scores: Callable[[], Record]) -> list[Record]:
    """The records of a run, the last of them the test scores: added unless they are there from before a crash."""
    metrics = distributed.on_main(results.metrics)
    if metrics[-1]["split"] != "test":
        last = {name: metrics[-1][name] for name in ("step", "seconds")}
        metrics.append({"split": "test", **scores(), **last})
        results.append(metrics[-1:])
    return metrics


def check_trained(record: Record, saved: str = "") -> None:
    """A FloatingPointError if training diverged: a command that trains one model must not end as if it had gone well.

    record: has `diverged`, why, and `best_step`, 0 for the untrained weights. saved: where the best weights are now.
    """
    best = record["best_step"]
    if record["diverged"] and (saved or not best):
        kept = f"the weights of step {best}, the best before, are in {saved}"
        none = "no weights were better than the untrained ones, and no model is saved"
        raise FloatingPointError(f"training diverged: {record['diverged']}; {kept if best else none}")


def untrained_note(record: Record) -> list[str]:
    """What a table says if no evaluation was better than that of the untrained weights, which are the ones kept."""
    kept = not record["best_step"] and record["steps"] and not record["diverged"]
    return ["No evaluation was better than that of the untrained weights, which are the ones kept."] if kept else []


def lowest(scores: Mapping[int, Error]) -> int:
    """The first step of the lowest error; NaN is above all numbers."""
    return min(scores, key=lambda step: (any(map(math.isnan, scores[step])), scores[step], step))
