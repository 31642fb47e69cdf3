"""The recipe of a command that names none: what suits the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from femixer.tasks.vision.experiment import Training
from femixer.tasks.vision.source import DIGITS
from femixer.training.recipe import apply, with_recipe

Options = TypeVar("Options")

FOLDERS = "images"
"""For pictures of one's own, that are neither the digits nor ImageNet."""


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
    return apply(default, DIGITS if data == DIGITS else FOLDERS), [*args]
