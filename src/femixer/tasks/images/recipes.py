"""The recipe of a command that names none: what suits the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from femixer.tasks.images.source import DIGITS
from femixer.training.recipe import apply, with_recipe

Options = TypeVar("Options")

FOLDERS = "images"
"""For pictures of one's own, that are neither the digits nor ImageNet."""


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
