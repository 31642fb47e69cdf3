"""`femixer vision train`: a classifier from pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from femixer.models.parameters import parameter_count
from femixer.options import check, parse
from femixer.tasks.vision.augmentation import Augmentation
from femixer.tasks.vision.broken import FILE as BROKEN
from femixer.tasks.vision.classifier import config_of
from femixer.tasks.vision.experiment import Sizes, Spec, Training, specified
from femixer.tasks.vision.figures import CONFUSION, PREDICTIONS, confusion, curves, samples, save
from femixer.tasks.vision.fitting import Fitted, Loading, fitted
from femixer.tasks.vision.maps import MAPS, map_figure
from femixer.tasks.vision.recipes import with_recipe_of_data, within_epochs
from femixer.tasks.vision.source import DIGITS, Images, Reading, read
from femixer.tasks.vision.views import spread, stacked
from femixer.training import EngineOptions, Results, RunOptions, distributed, show_table
from femixer.training.results import MODEL

SHOWN = 4
"""Pictures of the figure of posterior maps."""


@dataclass(frozen=True)
class Command:
    """Train a classifier on pictures, by default on scikit-learn's digits.

    The results folder gets config.json, metrics.jsonl, table.md, figures (figure.png with the curves, confusion.png,
    predictions.png, maps.png) and model/, the weights of the best validation accuracy, which `femixer vision eval` and
    transformers' Auto classes load. `--recipe NAME` (or a YAML file) gives other defaults for all of these options:
    digits and images (for pictures of your own) are taken by themselves, deit-imagenet is the paper's.
    """

    model: str = "FEM-SM"
    """Model by its name in the paper's tables: FEM-SM, FEM-GLA, SMAttn (plain attention), GLA, ..."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    seed: int = 0
    """Seed of the weights, of the order of the pictures, of augmentation and of dropout; not of the parts."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)
    augmentation: Augmentation = field(default_factory=Augmentation)
    loading: Loading = field(default_factory=Loading)
    engine: EngineOptions = field(default_factory=EngineOptions)
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/vision")))


def run(command: Command) -> Results:
    """Train, score and save a model; the folder then holds everything about it."""
    command.engine.validate()
    shard = command.engine.shard
    check(shard == "none", "shard", shard, "none: the best weights are kept whole, and these models are small")
    command.loading.validate()
    command.run.apply()
    images = read(command.data, command.reading, command.sizes.channels)
    spec = specified(command.model, images, command.seed, command.sizes, command.training, command.augmentation)
    parameter_count(
        config_of(spec, images)
    )  # its layers say themselves what they cannot be, before anything is written
    results = Results("vision", spec, command.run, (BROKEN, CONFUSION, PREDICTIONS, MAPS))
    if not results.finished:
        made = fitted(spec, images, results, command.loading, command.engine)
        distributed.on_main(lambda: finish(results, spec, images, made))
    return results


def finish(results: Results, spec: Spec, images: Images, made: Fitted) -> None:
    """Save the model, and write figures and table: what makes the run finished comes last."""
    folder = results.folder
    made.classifier.save(folder / MODEL)
    results.write_figure(curves(made.record, spec.title))
    save(folder / CONFUSION, confusion(made.predictions, images.classes, f"{spec.title}, test part"))
    save(folder / PREDICTIONS, samples(made.predictions, made.test, images.classes, spec.title))
    if spec.fields["mixer"] == "fem":  # no other mixer can be looked into
        places = spread(made.predictions.labels, SHOWN)
        shown = [view for n in made.predictions.numbers[places].tolist() if (view := made.test.read(n)) is not None]
        pixels, labels = stacked(shown)
        save(folder / MAPS, map_figure(made.classifier, pixels, labels.tolist(), spec.title))
    results.finish(table(spec, images, made))


def table(spec: Spec, images: Images, made: Fitted) -> str:
    record, counts = made.record, images.counts
    parts = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    lines = [
        f"{spec.dataset}: {len(images.classes)} classes, {parts} pictures, {spec.training.epochs} epochs, "
        f"seed {spec.seed}. The best weights by validation accuracy, scored on the test part.",
        "",
        "| model | parameters | best epoch | validation accuracy | test accuracy | top 5 | test loss | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| {spec.model} | {record['parameter_count']:,} "
        f"| {record['best_step'] * spec.training.epochs // max(1, record['steps'])} "
        f"| {record['validation_top1']:.2%} | {record['top1']:.2%} | {record['top5']:.2%} | {record['loss']:.4f} "
        f"| {record['seconds']:.0f} |",
    ]
    if record["broken"]:
        lines += ["", f"{record['broken']} pictures could not be read and were skipped; {BROKEN} names them."]
    if record["diverged"]:
        lines += ["", f"Training ended early: {record['diverged']}."]
    return "\n".join([*lines, ""])


def main(args: Sequence[str]) -> int:
    default, args = with_recipe_of_data(Command(), args)
    command = parse(Command, args, "vision train", default)
    results = run(replace(command, training=within_epochs(command.training, args)))
    show_table(results)
    if distributed.is_main():
        print(f"Results are in {results.folder}/, the model in {results.folder / MODEL}/")
    return 0
