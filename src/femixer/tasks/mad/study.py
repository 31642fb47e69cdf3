"""What decides how early a free energy mixer learns a task? `femixer mad study` trains variants of its start.

`run` is variants x tasks x seeds, as jobs of a store, `table` at which step each variant has learned. Every job is
trained until it has learned or for 4,000 steps, at the sizes and settings of the protocol `lite`, with one learning
rate. Variants of the same parts start, seed by seed, from the same weights where the variant does not say otherwise,
and see the same batches.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from femixer.gates import raw_temperature
from femixer.mixer import GATES, FreeEnergyMixer
from femixer.models.named import baseline, fem
from femixer.options import Count, Rate, check_different
from femixer.projection import Projection
from femixer.reporting import Column, Group, Score, Table, difference
from femixer.reporting.table import Difference
from femixer.tasks.mad.data import IGNORE
from femixer.tasks.mad.fit import Examples, MadJob, summed_cross_entropy
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.runner import Run, Seeds
from femixer.training import Results, adamw
from femixer.training.jobs import Jobs
from femixer.training.results import Record
from femixer.training.seeding import seeded
from femixer.training.store import as_text, distinct, same


@dataclass(frozen=True)
class Variant:
    """A mixer and its start; None is what the mixer says itself."""

    parts: str | None = None
    """None: plain attention."""
    start: Literal["paper", "prior"] = "paper"
    lam: float | None = None
    """Where lambda starts; needs start="prior", which gives it odds."""
    maps: Literal["zero", "normal", "torch"] | None = None
    """How the maps of lambda and g start; "torch" also starts those of the conditioner so."""
    beta: float | None = None
    """Where beta_max starts."""
    without: str = ""
    """A column that the conditioner does not modulate: v, lam, gate, q or k."""
    decay: float = 0.0
    """Weight decay of the temperatures."""
    rate: float = 1.0
    """Multiple of the learning rate of temperatures, and of the maps and biases of lambda and g."""
    conditioner: float = 1.0
    """Multiple of the learning rate of the conditioner and of its maps to the projections."""

    def fields(self) -> dict[str, Any]:
        """Of FEMConfig."""
        if self.parts is None:
            return baseline("attention")
        return {**fem("softmax", self.parts), **({"start": self.start} if self.start != "paper" else {})}


def named(name: str) -> Variant:
    """The variant that a name says: parts, then fields and their values. Mixers with gates start="prior" unless the
    name says paper or torch, which is how its maps start."""
    parts, *words = name.split("-")
    if parts == "attention":
        return Variant()
    if words in (["paper"], ["torch"]) or not {"T", "G"} & {*parts}:
        return Variant(parts, maps="torch" if "torch" in words else None)
    own: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=False):
        own[option] = value if option in ("maps", "without") else float(value)
    return Variant(parts, "prior", **own)


VARIANTS = {
    name: named(name)
    for name in (
        *("attention", "CLTG-paper", "CLTG-prior", "LTG-paper", "LTG-prior", "C", "G", "LT", "G-rate-0.3"),
        *("LTG-rate-0.3", "CLTG-conditioner-0.1", "CLTG-conditioner-0.3", "CLTG-rate-0.3-conditioner-0.1"),
        *("CLTG-torch", "LTG-torch", "CLTG-lam-0.05", "LTG-lam-0.05", "CLTG-lam-0.5", "LTG-lam-0.5"),
        *("CLTG-maps-normal", "CLTG-lam-0.05-maps-normal", "CLTG-beta-1", "CLTG-beta-0.5", "CLTG-lam-0.05-beta-0.02"),
        *("CLTG-without-v", "CLTG-without-lam", "CLTG-without-gate", "CLTG-without-q", "CLTG-without-k"),
        *("CLTG-decay-0.1", "CLTG-rate-3", "CLTG-rate-0.3", "CG", "CLT"),
    )
}
"""The most telling ones first."""


def mixers(model: nn.Module) -> list[FreeEnergyMixer]:
    return [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]


def columns(parameter: Tensor, projection: Projection, *names: str) -> list[Tensor]:
    """Rows of a parameter of the projection that are the columns of these names, sharing its memory."""
    rows = parameter.detach().split(projection.widths)
    return [each for name, each in zip(projection.columns, rows, strict=True) if name in names]


@torch.no_grad()
def begin(model: nn.Module, variant: Variant) -> None:
    """Start the mixers as the variant says, where that is not how they start anyway."""
    for mixer in mixers(model):
        if variant.lam is not None and mixer.lam_odds is not None:
            mixer.lam_odds.fill_(variant.lam / (1 - variant.lam))
        if variant.beta is not None and mixer.raw_beta is not None:
            mixer.raw_beta.fill_(raw_temperature(variant.beta))
        if variant.maps in ("zero", "normal"):
            for rows in columns(mixer.value_proj.linear.weight, mixer.value_proj, *GATES):
                nn.init.normal_(rows, std=0.02) if variant.maps == "normal" else nn.init.zeros_(rows)
        for projection, modulation in modulations(mixer) if variant.without else ():
            modulation.register_hook(without_columns(projection, variant.without))


def modulations(mixer: FreeEnergyMixer) -> list[tuple[Projection, Tensor]]:
    """The projections that the conditioner modulates, and its maps to them."""
    both = ((p, None if p is None else p.modulation) for p in (mixer.prior_proj, mixer.value_proj))
    return [(p, m) for p, m in both if p is not None and m is not None]


def without_columns(projection: Projection, name: str) -> Callable[[Tensor], Tensor]:
    """A hook of the gradient of the modulation, which starts at zero: these columns of it stay there."""

    def hook(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        for rows in columns(kept, projection, name):
            rows.zero_()
        return kept

    return hook


def optimizer_of(model: nn.Module, variant: Variant, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, in which temperatures may decay, and temperatures, gates and conditioner learn at rates of their own."""
    optimizer = adamw(model, lr, weight_decay, fused=True)
    own: dict[Tensor, dict[str, float]] = {}
    for mixer in mixers(model):
        if variant.decay or variant.rate != 1:
            for bare, decay in ((mixer.raw_beta, variant.decay), (mixer.lam_odds, 0.0)):
                if bare is not None:
                    own[bare] = {"lr": lr * variant.rate, "weight_decay": decay}
        if variant.conditioner != 1:
            parts = [m for _, m in modulations(mixer)]
            parts += mixer.conditioner.parameters() if mixer.conditioner is not None else ()
            own |= {part: {"lr": lr * variant.conditioner, "weight_decay": weight_decay} for part in parts}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in own]
    for p, options in own.items():
        optimizer.add_param_group({"params": [p], **options})
    if variant.rate != 1:
        rows = [each for m in mixers(model) for each in columns(m.value_proj.linear.weight, m.value_proj, *GATES)]
        hurry(optimizer, rows, variant.rate)
    return optimizer


def hurry(optimizer: torch.optim.Optimizer, rows: Sequence[Tensor], rate: float) -> None:
    """Parts of parameters move `rate` times as far at every step: AdamW has rates for whole parameters only."""
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before[:] = [each.clone() for each in rows]

    def move(*_: Any) -> None:
        for each, old in zip(rows, before, strict=True):
            each.copy_(torch.lerp(old, each, rate))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(move)


TASKS = ("fuzzy-recall", "compression")
LEVEL = 0.9
"""A model has learned a task at the first evaluation with a larger accuracy."""


def curve(record: Record) -> Iterator[tuple[int, float]]:
    """Steps and accuracies."""
    for at in record["evaluations"]:
        yield at["step"], at["validation"]["accuracy"]


def learned(record: Record) -> int | None:
    """The step of the first evaluation above LEVEL, if there is one."""
    return next((step for step, accuracy in curve(record) if accuracy > LEVEL), None)


def average(record: Record) -> float:
    """The mean accuracy over all steps; that of the last evaluation stands for those that were not needed."""
    points = [*curve(record)]
    last = (record["steps"], points[-1][1])
    pairs = zip(points, [*points[1:], last], strict=True)
    area = sum((after - before) * (a + b) / 2 for (before, a), (after, b) in pairs)
    return area / record["steps"]


def tabulate(records: Sequence[Record]) -> list[Table]:
    """A table per task: variants in the order of VARIANTS."""
    same(records, "ways of training", training, "task")
    same(records, "variants of one name", lambda record: as_text(record["variant"]), "model")
    records = distinct(records, lambda record: as_text(record["evaluations"]), ("model", "task", "seed"))
    return [table(task, of_task) for task in TASKS if (of_task := [r for r in records if r["task"] == task])]


def training(record: Record) -> str:
    """What variants that are compared must agree in."""
    return as_text([record["lr"], record["steps"], record["parameters"], record["training"]["evaluate_every"]])


def table(task: str, records: Sequence[Record]) -> Table:
    steps, seeds = records[0]["steps"], sorted({record["seed"] for record in records})
    rows, attention = [], Score({r["seed"]: average(r) for r in records if r["model"] == "attention"}, len(seeds))
    for name in [*VARIANTS, *dict.fromkeys(r["model"] for r in records if r["model"] not in VARIANTS)]:
        own = sorted((record for record in records if record["model"] == name), key=lambda record: record["seed"])
        if own:
            when = [learned(record) for record in own]
            each = ", ".join(f"> {steps}" if step is None else str(step) for step in when)
            middle = sorted(math.inf if step is None else step for step in when)[len(when) // 2]
            shown = f"> {steps}" if middle == math.inf else f"{middle:g}"
            scores = Score({record["seed"]: average(record) for record in own}, len(seeds))
            pairs = [100 * each for each in difference(scores, attention).scores.values()]
            less = Difference.of(pairs).text(1) if pairs and name != "attention" else ""
            rows.append([name, shown, each, scores.cell(1, 100), less, str(own[0]["parameter_count"])])
    every, lr, numbers = records[0]["training"]["evaluate_every"], records[0]["lr"], ", ".join(map(str, seeds))
    title = (
        f"{task}: step of the first evaluation (one every {every} steps) with more than {LEVEL:.0%} of the scored "
        f"tokens right; lr {lr:g}, seeds {numbers}."
    )
    heads = (
        Column("variant"),
        Column("median step", align="right"),
        Column("step of each seed"),
        Column("mean accuracy", key="average", scores=True),
        Column("less attention's", align="right"),
        Column("parameters", align="right"),
    )
    notes = (
        f"Mean accuracy: in percent, over all {steps} steps (a job that has learned keeps its last); ± standard error. "
        "Less attention's: the mean difference over the seeds of both, with its 95 % interval by Student's t.",
    )
    return Table(heads, [Group(rows)], title=title, notes=notes)


ENOUGH = 0.95
"""Training ends after two evaluations in a row with a larger accuracy."""


@dataclass(frozen=True)
class StudyJob(MadJob):
    """One variant on one task, with one seed; its accuracy is per scored token, on the validation split."""

    variant: Mapping[str, Any] = field(default_factory=dict)
    splits = ("validation",)

    @property
    def title(self) -> str:
        return f"{self.model} {self.task} lr {self.lr:g} seed {self.seed}"

    def summary(self, record: Record) -> str:
        when, last = learned(record), record["evaluations"][-1]
        told = "has not learned" if when is None else f"has learned at step {when}"
        return f"{told}; accuracy {last['validation']['accuracy']:.3f} at step {last['step']}"

    def built(self) -> nn.Module:
        model = super().built()
        with seeded(self.seed, "study"):
            begin(model, Variant(**self.variant))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model, Variant(**self.variant), self.lr, self.weight_decay)

    def score(self, model: Callable[..., Any], examples: Examples) -> dict[str, float]:
        logits, targets = model(examples.inputs, use_cache=False).logits, examples.targets
        scored = targets != IGNORE
        hits, count = float((logits.argmax(-1) == targets)[scored].sum()), int(scored.sum())
        return {"accuracy": hits / count, "loss": float(summed_cross_entropy(logits, targets)) / count}

    def ended(self, records: Sequence[Record], results: Results) -> bool:
        accuracies = [record["accuracy"] for record in results.metrics() if record.get("split") == "validation"]
        return len(accuracies) > 1 and min(accuracies[-2:]) > ENOUGH

    def record(self, metrics: Sequence[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
        return {**super().record(metrics, diverged, parameters, device), "variant": dict(self.variant)}


@dataclass(frozen=True)
class Experiment(Seeds):
    """What is run."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    """Variants by name, run in this order."""
    tasks: tuple[str, ...] = TASKS
    """Tasks, in the setting of the protocol lite."""
    seeds: Count = 5
    """Number of seeds, counted up from --seed; each has other data and initial weights."""
    lr: Rate = 2e-3
    """Learning rate."""
    steps: Count = 4000
    """Training steps, unless it has learned before: two evaluations in a row above 0.95."""
    evaluate_every: Count = 100
    """Steps between two evaluations."""

    def jobs(self) -> list[StudyJob]:
        """Variant by variant, all seeds of one before the next; a ValueError if one is not possible."""
        check_different(self, "variants", VARIANTS)
        check_different(self, "tasks", TASKS)
        seeds = self.every_seed()
        return [self.job(name, task, seed) for name in self.variants for task in self.tasks for seed in seeds]

    def job(self, name: str, task: str, seed: int) -> StudyJob:
        protocol, variant = PROTOCOLS["lite"], VARIANTS[name]
        (parameters,) = protocol.settings(task)
        return StudyJob.of(
            protocol,
            task,
            parameters,
            variant.fields(),
            model=name,
            protocol="study",
            seed=seed,
            lr=self.lr,
            weight_decay=0.0,
            steps=self.steps,
            evaluate_every=self.evaluate_every,
            gates="torch" if variant.maps == "torch" else "own",
            variant=asdict(variant),
        )


@dataclass(frozen=True)
class StudyRun(Run):
    """Train variants of the mixer until they have learned a task, or for 4,000 steps.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/mad-study")))

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)
