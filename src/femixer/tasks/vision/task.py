"""`femixer vision train` and `run`: one classifier, or models x seeds as jobs of a store."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

from femixer.models import Card
from femixer.models.named import parameter_count
from femixer.options import apply_recipe, as_typed, check, check_different, check_options, expanded, parse, with_recipe
from femixer.reporting import Table, as_markdown
from femixer.reporting.figures import save
from femixer.tasks.runner import DataJob, Run, Seeds, told
from femixer.tasks.vision import TASK
from femixer.tasks.vision.data import ABOUT_DIGITS, DIGITS, DataSet, Reading, read
from femixer.tasks.vision.data.augmentation import Augmentation
from femixer.tasks.vision.data.views import BROKEN, spread, stacked
from femixer.tasks.vision.evaluate import CONFUSION, MAPS, PREDICTIONS, confusion, curves, map_figure, samples
from femixer.tasks.vision.fit import Fitted, Loading, fitted
from femixer.tasks.vision.model import ENCODERS, Sizes, Spec, Training, config_of, specified
from femixer.tasks.vision.table import ORDER, TOP1, tabulate
from femixer.training import EngineOptions, Results, RunOptions, distributed, show_table
from femixer.training.engine import check_fits
from femixer.training.jobs import Jobs
from femixer.training.loop import check_trained, untrained_note
from femixer.training.results import MODEL, Record
from femixer.training.store import RECORD

Options = TypeVar("Options")

FOLDERS = "images"
"""For images of one's own, that are neither the digits nor ImageNet."""


def within_epochs(training: Training, args: Sequence[str]) -> Training:
    """A warm-up that only the recipe asks for lasts no longer than training."""
    given = any(arg.partition("=")[0].replace("_", "-") == "--warmup-epochs" for arg in args)
    if given or training.warmup_epochs <= training.epochs:
        return training
    return replace(training, warmup_epochs=float(training.epochs))


def with_recipe_of_data(default: Options, args: Sequence[str]) -> tuple[Options, list[str]]:
    """As `with_recipe`; without --recipe it is `digits` for the digits and `images` for everything else."""
    if any(arg.partition("=")[0] == "--recipe" for arg in args):
        return with_recipe(default, args)
    data = DIGITS
    for number, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name == "--data":
            data = value or next(iter(args[number + 1 :]), "")
    return apply_recipe(default, DIGITS if data == DIGITS else FOLDERS), [*args]


@dataclass(frozen=True)
class VisionJob(DataJob):
    """A model trained on one set of images with one seed."""

    loading: Loading
    engine: EngineOptions

    def read(self) -> DataSet:
        return read(self.data, self.reading, self.spec.fields["num_channels"])

    def fitted(self, data: DataSet, options: RunOptions) -> Record:
        return fitted(self.spec, data, Results("vision", self.spec, options), self.loading, self.engine).record

    def summary(self, record: Record) -> str:
        return f"test accuracy {record['top1']:.2%} (validation {record['validation_top1']:.2%})"


SHOWN = 4
"""Images of the figure of posterior maps."""


@dataclass(frozen=True)
class Setting:
    """Options shared by one training and many."""

    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)
    augmentation: Augmentation = field(default_factory=Augmentation)
    loading: Loading = field(default_factory=Loading)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def validate(self) -> None:
        """What can be known before the images are read."""
        self.engine.validate()
        shard = self.engine.shard
        check(shard == "none", "shard", shard, "none: the best weights are kept whole, and these models are small")
        check_options(self.loading)


@dataclass(frozen=True)
class Train(Setting):
    """Train a classifier on images, by default on scikit-learn's digits.

    The results folder gets config.json, metrics.jsonl, table.md, record.json (for `femixer vision table`), figures
    (figure.png with the curves, confusion.png, predictions.png, maps.png) and model/, the weights of the best
    validation accuracy, which `femixer vision eval` and transformers' Auto classes load. `--recipe NAME` (or a YAML
    file) gives other defaults for all of these options: digits and images (for images of your own) are taken by
    themselves, deit-imagenet is the paper's.
    """

    model: str = "FEM-SM"
    """Model by its name in the paper's tables: FEM-SM, FEM-GLA, SMAttn (plain attention), GLA, ..."""
    seed: int = 0
    """Seed of the weights, of the order of the images, of augmentation and of dropout; not of the parts."""
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/vision")))


def finish(results: Results, spec: Spec, dataset: DataSet, made: Fitted, about: str) -> None:
    """Save the model, and write figures and table: what makes the run finished comes last."""
    folder, record = results.folder, made.record
    counts = ", ".join(f"{count:,} {split}" for split, count in dataset.counts.items())
    made.classifier.model.card = Card(
        data=f"{about}: {len(dataset.classes)} classes, {counts} images.",
        command=as_typed(),
        metrics={
            "validation accuracy": record["validation_top1"],
            "test accuracy": record["top1"],
            "test accuracy (top 5)": record["top5"],
            "test loss": record["loss"],
        },
    )
    made.classifier.save(folder / MODEL)
    TASK.keep(made.record, folder)
    results.write_figure(curves(made.record, spec.title))
    save(confusion(made.predictions, dataset.classes, f"{spec.title}, test part"), folder / CONFUSION)
    save(samples(made.predictions, made.test, dataset.classes, spec.title), folder / PREDICTIONS)
    if spec.fields["mixer"] == "fem":  # no other mixer can be looked into
        places = spread(made.predictions.labels, SHOWN)
        shown = [view for n in made.predictions.numbers[places].tolist() if (view := made.test.read(n)) is not None]
        pixels, labels = stacked(shown)
        save(map_figure(made.classifier, pixels, labels.tolist(), spec.title), folder / MAPS)
    results.finish(as_markdown(summary(spec, dataset, made, about)))


def summary(spec: Spec, dataset: DataSet, made: Fitted, about: str) -> Table:
    record = made.record
    parts = ", ".join(f"{count:,} {split}" for split, count in dataset.counts.items())
    best = record["best_step"] * spec.training.epochs // max(1, record["steps"])
    shares = [f"{record[name]:.2%}" for name in ("validation_top1", "top1", "top5")]
    row = [spec.model, f"{record['parameter_count']:,}", str(best), *shares]
    notes = [f"Data: {about}.", *untrained_note(record)]
    if record["broken"]:
        notes.append(f"{record['broken']} images could not be read and were skipped; {BROKEN} names them.")
    if record["diverged"]:
        notes.append(f"Training ended early: {record['diverged']}.")
    return Table.of(
        ("model", "parameters", "best epoch", "validation accuracy", "test accuracy", "top 5", "test loss", "seconds"),
        [[*row, f"{record['loss']:.4f}", f"{record['seconds']:.0f}"]],
        f"{spec.dataset}: {len(dataset.classes)} classes, {parts} images, {spec.training.epochs} epochs, seed "
        f"{spec.seed}. The best weights by validation accuracy, scored on the test part.",
        *notes,
    )


def train(args: Sequence[str]) -> int:
    """Train, score and save a model; the folder then holds everything about it."""
    default, args = with_recipe_of_data(Train(), args)
    command = parse(Train, args, "vision train", default)
    training = within_epochs(command.training, args)
    command.validate()
    command.run.apply()
    command.sizes.validate(command.model)
    about = told(command.data, ABOUT_DIGITS)
    dataset = read(command.data, command.reading, command.sizes.channels)
    spec = specified(command.model, dataset, command.seed, command.sizes, training, command.augmentation)
    config = config_of(spec, dataset)  # the layers say what they cannot be, before anything is written
    check_fits(parameter_count(config), "width", config.hidden_size)
    written = (BROKEN, CONFUSION, PREDICTIONS, MAPS, RECORD)
    results = Results("vision", spec, command.run, written, {"data": about})
    if not results.finished:
        made = fitted(spec, dataset, results, command.loading, command.engine)
        check_trained(made.record)
        distributed.on_main(lambda: finish(results, spec, dataset, made, about))
        check_trained(made.record, f"{results.folder / MODEL}/")
    return show_table(results)


CHOICES = {"all": tuple(ENCODERS), "paper": tuple(name for name in TOP1["deit-tiny"] if name in ENCODERS)}
"""What --models takes besides names."""
EQUAL = 0.02
"""Parameters that models which are compared may differ by."""


@dataclass(frozen=True)
class Experiment(Setting, Seeds):
    """What is run."""

    models: tuple[str, ...] = ORDER
    """Models by their names in the paper's tables; SMAttn is plain attention.
    paper: those of its table that are encoders here; all: every encoder."""

    def jobs(self) -> list[VisionJob]:
        """Each once, all of the first seed first; a ValueError if one of them is not possible."""
        check_different(self, "models")
        seeds = self.every_seed()
        self.validate()
        self.sizes.validate(*self.models)
        told(self.data, ABOUT_DIGITS)
        dataset = read(self.data, self.reading, self.sizes.channels)
        first = [
            specified(model, dataset, self.seed, self.sizes, self.training, self.augmentation) for model in self.models
        ]
        counts = {spec.model: parameter_count(config_of(spec, dataset)) for spec in first}
        check_fits(max(counts.values()), "width", self.sizes.width)
        spread = max(counts.values()) / min(counts.values()) - 1
        fair = "" if spread <= EQUAL else f", which is more than the {EQUAL:.0%} of a fair comparison"
        each = ", ".join(f"{model} {count:,}" for model, count in counts.items())
        print(f"parameters: {each}; they differ by {spread:.1%} at most{fair}", file=sys.stderr)
        return [
            VisionJob(replace(spec, seed=seed), self.data, self.reading, self.loading, self.engine)
            for seed in seeds
            for spec in first
        ]


@dataclass(frozen=True)
class VisionRun(Run):
    """Train models on images, each with every seed.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on. `--recipe NAME` (or a
    YAML file) gives other defaults, as for `femixer vision train`.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/vision-runs")))

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)

    @classmethod
    def parse(cls, args: Sequence[str], command: str) -> Self:
        default, args = with_recipe_of_data(cls(), args)
        given = parse(cls, args, command, default)
        training = within_epochs(given.experiment.training, args)
        models = expanded(given.experiment.models, CHOICES)
        return replace(given, experiment=replace(given.experiment, training=training, models=models))
