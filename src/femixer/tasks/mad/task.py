"""`femixer mad run`: models x settings x (learning rate, weight decay) x seeds, by a protocol, as jobs of a store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from femixer.models.named import NAMED, Mixing, Rivals, parameters_of
from femixer.options import Count, Rate, check, check_different, check_options, given
from femixer.reporting import Table
from femixer.tasks.mad.data import TASKS, sample
from femixer.tasks.mad.fit import MadJob
from femixer.tasks.mad.model import build
from femixer.tasks.mad.protocol import PROTOCOLS, Protocol
from femixer.tasks.mad.table import FIGURES, tabulate
from femixer.tasks.runner import Run, Seeds
from femixer.training.engine import check_fits
from femixer.training.jobs import Jobs
from femixer.training.results import Record


@dataclass(frozen=True)
class Experiment(Seeds):
    """What is run."""

    models: tuple[str, ...] = ("SMAttn", "FEM-SM")
    """Models by the names of the paper's tables. paper: the 24 of its table; all: every one that has a name."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks."""
    protocol: str = "lite"
    """lite, for a CPU; small, longer and with three learning rates to choose from;
    baseline, the original's six default settings; full, its 66 settings."""
    lr: tuple[Rate, ...] | None = None
    """Learning rates, instead of the protocol's."""
    weight_decay: tuple[float, ...] | None = None
    """Weight decays, instead of the protocol's."""
    length: int | None = None
    """Length of the sequences, in all chosen tasks. This and the options below make a protocol of another name."""
    vocabulary: int | None = None
    """Number of tokens, in all chosen tasks."""
    train: int | None = None
    """Training sequences."""
    rivals: Rivals = field(default_factory=Rivals)
    batch: Count | None = None
    """Sequences of a training step."""
    steps: Count | None = None
    """Training steps."""
    mixing: Mixing = field(default_factory=Mixing)
    precision: Literal["no", "bf16"] = "no"
    """Mixed precision: bf16 multiplies matrices in bfloat16, as the original does on a GPU."""

    def validate(self) -> None:
        """Raise a ValueError unless every job is possible."""
        check_different(self, "models", NAMED)
        check_different(self, "tasks", TASKS)
        check(self.protocol in PROTOCOLS, "protocol", self.protocol, f"one of {', '.join(PROTOCOLS)}")
        check_options(self)
        check(self.lr != (), "lr", (), "at least one")
        decay = self.weight_decay
        check(decay is None or (len(decay) > 0 and min(decay) >= 0), "weight_decay", decay, "numbers of at least 0")
        self.mixing.validate(*(NAMED[model] for model in self.models))
        jobs = self.jobs()
        self.rivals.validate(*(job.fields for job in jobs))
        for task, parameters in {(job.task, str(job.parameters)): (job.task, job.parameters) for job in jobs}.values():
            sample(task, 1, **parameters)
        largest = sorted(jobs, key=lambda job: job.fields["vocab_size"])
        for job in {(job.model, TASKS[job.task].last_position_only): job for job in largest}.values():
            with torch.device("meta"):
                model = build(job.task, job.fields, job.seed)
            check_fits(parameters_of(model), "vocabulary", job.parameters["vocabulary"])

    def jobs(self) -> list[MadJob]:
        """Each once, whatever options make two settings the same."""
        protocol = self.changed()
        jobs = [
            self.job(protocol, model, task, parameters, lr=lr, weight_decay=weight_decay, seed=seed)
            for seed in self.every_seed()
            for task in self.tasks
            for parameters in protocol.settings(task)
            for model in self.models
            for lr in self.lr or protocol.plan(task).learning_rates
            for weight_decay in self.weight_decay or protocol.plan(task).weight_decays
        ]
        return [*{job.digest: job for job in jobs}.values()]

    def job(self, protocol: Protocol, model: str, task: str, parameters: Mapping[str, Any], **tuned: Any) -> MadJob:
        row, steps = NAMED[model], protocol.steps(task, parameters)
        row = {**row, **self.mixing.fields(row), **self.rivals.fields(row)}
        every = max(1, steps // protocol.evaluations)
        named = {"model": model, "protocol": protocol.name, "steps": steps, "evaluate_every": every}
        return MadJob.of(protocol, task, parameters, row, **named, **tuned)

    def changed(self) -> Protocol:
        """The protocol with what the options change, and a name that says so."""
        protocol = PROTOCOLS[self.protocol]
        parameters = given(length=self.length, vocabulary=self.vocabulary, train=self.train)
        training = given(batch=self.batch, steps=self.steps)
        engine = {} if self.precision == protocol.precision else {"precision": self.precision}
        plans = {
            task: replace(plan, parameters={**plan.parameters, **parameters}, **training)
            for task, plan in ((task, protocol.plan(task)) for task in self.tasks)
        }
        words = [f"{name}={value}" for name, value in {**parameters, **training, **engine}.items()]
        return replace(protocol, name=" ".join([protocol.name, *words]), plans=plans, precision=self.precision)


@dataclass(frozen=True)
class MadRun(Run):
    """Train models on the tasks of MAD.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    groups = MappingProxyType({"all": tuple(NAMED), "paper": tuple(FIGURES)})
    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/mad")))
    select: Literal["validation", "test"] = "validation"
    """Selecting split of the final table, as in `femixer mad table`; the runs do not depend on it."""

    def jobs(self) -> list[MadJob]:
        self.experiment.validate()
        return self.experiment.jobs()

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return [tabulate(records, self.select)]

    @property
    def resumable(self) -> bool:
        return PROTOCOLS[self.experiment.protocol].resumable
