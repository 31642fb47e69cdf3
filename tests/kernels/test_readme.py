"""The worked examples of kernels/README.md run: an operator, then a backend for it."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import femixer
from femixer.kernels.operator import OPERATORS

README = Path(femixer.__file__).parent / "kernels" / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    OPERATORS.pop("softcap", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "softcap"]:
        del sys.modules[name]
    torch._dynamo.reset()


def test_the_worked_examples_run_as_they_are_told(folder: Path) -> None:
    """Files are written as the text names them; what is no file is run in between, in one namespace."""
    namespace: dict[str, Any] = {}
    files = []
    for block in BLOCKS:
        name = re.match(r"# ([\w/]+\.py)\n", block)
        if name is None:
            if "softcap.numba_cpu" in block:  # a backend that was not there when the operator was declared
                importlib.invalidate_caches()
                OPERATORS["softcap"].implementations.pop("numba", None)
            exec(compile(block, str(README), "exec"), namespace)
        else:
            path = folder / name[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
            files.append(name[1])
    expected = ["__init__", "plain", "numba_cpu"]
    assert files == [f"softcap/{name}.py" for name in expected]
    assert len(BLOCKS) == len(files) + 2


def test_every_operator_is_in_the_table() -> None:
    folders = {path.parent.name for path in README.parent.glob("*/plain.py")}
    table = README.read_text(encoding="utf-8").partition("\n`femixer doctor`")[0]
    assert folders <= set(re.findall(r"`([a-z_]+)`", table))
