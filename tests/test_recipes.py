"""Recipes: YAML files that give a command other defaults, and errors that name what is wrong in them."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from femixer.options import parse, with_recipe


@dataclass(frozen=True)
class Layer:
    width: int = 3
    names: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class Recipe:
    layer: Layer = field(default_factory=Layer)
    lr: float = 0.1
    kind: Literal["one", "two"] = "one"
    folder: Path | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    limit: int | None = None
    fast: bool = False
    options: dict[str, int] = field(default_factory=dict)
    name: str = "some"
    stop: int | None = 7


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_recipe_gives_defaults_that_other_options_change(tmp_path):
    path = written(
        tmp_path,
        "width: 5 # nested, yet on one level\nnames: [x, y]\nlr: 4e-4\nkind: two\nfolder: some/where\nbetas: [0, 0.5]\n"
        "limit: 1_000\nfast: true\noptions: {a: 1}\nname: 1.10\nstop: null\n",
    )
    layer, folder = Layer(5, ("x", "y")), Path("some/where")
    expected = Recipe(layer, 4e-4, "two", folder, (0.0, 0.5), 1000, True, {"a": 1}, "1.10", None)
    for args in (["--recipe", path], [f"--recipe={path}"]):
        default, rest = with_recipe(Recipe(), args)
        assert (default, rest) == (expected, [])
    default, rest = with_recipe(Recipe(), ["--lr", "7", "--recipe", path, "--width", "11"])
    parsed = parse(Recipe, rest, "test", default)
    assert parsed == replace(expected, lr=7.0, layer=Layer(11, ("x", "y")))
    assert with_recipe(Recipe(), ["--lr", "7"]) == (Recipe(), ["--lr", "7"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("widht: 5", "widht is unknown; choose from betas, fast, folder, kind, limit, lr, name, names, options, stop"),
        ("layer: 5", "layer is unknown; choose from betas"),
        ("width: 5.0", "width='5.0' is not allowed; choose INT, as in --help"),
        ("width: true", "width='true' is not allowed; choose INT"),
        ("lr: fast", "lr='fast' is not allowed; choose FLOAT"),
        ("kind: three", "kind='three' is not allowed; choose {one,two}"),
        ("limit: 1e9", r"limit='1e9' is not allowed; choose {None}\|INT"),
        ("fast: 1", "fast='1' is not allowed; choose {True,False}"),
        ("lr:", "lr='' is not allowed; choose FLOAT"),
        ("names: [[a], b]", r"names=\[\['a'\], 'b'\] is not allowed; choose \[STR"),
        ("kind: [one, two]", r"kind=\['one', 'two'\] is not allowed; choose {one,two}"),
        ("betas: [0.5]", r"betas=\['0.5'\] is not allowed; choose FLOAT FLOAT"),
        ("names: {a: b}", r"names=.* is not allowed; choose \[STR"),
        ("options: 3", r"options='3' is not allowed; choose \[STR INT"),
        ("- lr", "expected `option: value` on each line"),
        ("lr: [", "not YAML"),
    ],
)
def test_an_error_in_a_recipe_names_file_key_value_and_what_is_allowed(tmp_path, line, message):
    path = written(tmp_path, line)
    with pytest.raises(ValueError, match=f"^{re.escape(path)}: {message}"):
        with_recipe(Recipe(), ["--recipe", path])


def test_an_unknown_recipe_is_answered_with_those_that_exist():
    with pytest.raises(ValueError, match=r"^recipe='paper' is not allowed; choose a YAML file, or one of .*paper-340m"):
        with_recipe(Recipe(), ["--recipe", "paper"])
