"""`femixer vision run`: models x seeds, as jobs that are not finished yet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from femixer.models.parameters import parameter_count
from femixer.options import check, parse
from femixer.tasks.vision.augmentation import Augmentation
from femixer.tasks.vision.classifier import config_of
from femixer.tasks.vision.experiment import Sizes, Training, specified
from femixer.tasks.vision.fitting import Loading
from femixer.tasks.vision.job import Job
from femixer.tasks.vision.recipes import with_recipe_of_data, within_epochs
from femixer.tasks.vision.source import DIGITS, Reading, read
from femixer.tasks.vision.store import KIND
from femixer.tasks.vision.table import ORDER, markdown, tabulate
from femixer.training import jobs
from femixer.training.jobs import Jobs

EQUAL = 0.02
"""Parameters that models which are compared may differ by."""


@dataclass(frozen=True)
class Experiment:
    """What is run."""

    models: tuple[str, ...] = ORDER
    """Models by their names in the paper's tables; SMAttn is plain attention."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    seeds: int = 1
    """Runs of everything, with seeds that go up from --seed."""
    seed: int = 0
    """The first seed."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)
    augmentation: Augmentation = field(default_factory=Augmentation)
    loading: Loading = field(default_factory=Loading)

    def jobs(self) -> list[Job]:
        """Each once, all of the first seed first; a ValueError if one of them is not possible."""
        check(0 < len(self.models) == len({*self.models}), "models", self.models, "different ones")
        check(self.seeds > 0, "seeds", self.seeds, "a whole number above 0")
        self.loading.validate()
        images = read(self.data, self.reading, self.sizes.channels)
        first = [
            specified(model, images, self.seed, self.sizes, self.training, self.augmentation) for model in self.models
        ]
        tell_parameters({spec.model: parameter_count(config_of(spec, images)) for spec in first})
        return [
            Job(replace(spec, seed=self.seed + number), self.data, self.reading, self.loading)
            for number in range(self.seeds)
            for spec in first
        ]


def tell_parameters(counts: dict[str, int]) -> None:
    """Print how many each model has, and whether that is a fair comparison."""
    spread = max(counts.values()) / min(counts.values()) - 1
    fair = "" if spread <= EQUAL else f", which is more than the {EQUAL:.0%} of a fair comparison"
    told = ", ".join(f"{model} {count:,}" for model, count in counts.items())
    print(f"parameters: {told}; they differ by {spread:.1%} at most{fair}", file=sys.stderr)


@dataclass(frozen=True)
class Command:
    """Train models on pictures, each with every seed.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on. `--recipe NAME` (or a
    YAML file) gives other defaults, as for `femixer vision train`.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/vision-runs")))


def run(command: Command) -> int:
    ran = jobs.run(command.experiment.jobs(), KIND, command.how, resumable=True)
    if ran is None:
        return 0
    return ran.tell(lambda records: markdown(tabulate(records)), command.how.out, "vision table")


def main(args: Sequence[str]) -> int:
    default, args = with_recipe_of_data(Command(), args)
    command = parse(Command, args, "vision run", default)
    training = within_epochs(command.experiment.training, args)
    command = replace(command, experiment=replace(command.experiment, training=training))
    try:
        return run(command)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
