"""Compiled kernels on disk: found again, and compiled anew when anything they inline has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import femixer

LOOPS = """
import numpy as np
from numba import prange
from femixer.kernels.numba_kernel import kernel
from femixer.kernels.numba_inner import scaled

@kernel
def forward(x, out):
    for i in prange(x.shape[0]):
        out[i] = scaled(x[i])
"""
INNER = """
from femixer.kernels.numba_kernel import {decorator}

@{decorator}
def scaled(x):
    return {factor} * x
"""
RUN = """
import numpy as np
from femixer.kernels import numba_loops
out = np.zeros(3)
numba_loops.forward(np.ones(3), out)
print(out[0])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what compiled kernels are made with, in a folder of its own."""
    source, copy = Path(femixer.__file__).parent / "kernels", tmp_path / "femixer" / "kernels"
    copy.mkdir(parents=True)
    (tmp_path / "femixer" / "__init__.py").touch()
    for name in ("__init__.py", "numba_kernel.py", "marks.py"):
        shutil.copy(source / name, copy / name)
    (copy / "numba_loops.py").write_text(LOOPS)
    return copy


def run(package: Path, cache: Path | None) -> tuple[float, str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr


@pytest.mark.parametrize(("decorator", "elsewhere"), [("inline", True), ("job", False)])
def test_a_kernel_is_compiled_again_when_what_it_calls_from_another_file_changes(
    package: Path, tmp_path: Path, decorator: str, elsewhere: bool
) -> None:
    cache = tmp_path / "cache" if elsewhere else None
    (package / "numba_inner.py").write_text(INNER.format(decorator=decorator, factor=2))
    assert run(package, cache)[0] == 2
    value, said = run(package, cache)
    assert (value, said) == (2, "")
    (package / "numba_inner.py").write_text(INNER.format(decorator=decorator, factor=3))
    value, said = run(package, cache)
    assert value == 3
    assert said.startswith("femixer: compiling kernels once") and said.count("\n") == 1
    assert bool(list(package.rglob("*.nbi"))) != elsewhere


def test_kernels_run_where_nothing_can_be_written(package: Path, tmp_path: Path) -> None:
    (package / "numba_inner.py").write_text(INNER.format(decorator="job", factor=2))
    (tmp_path / "file").touch()
    assert run(package, tmp_path / "file")[0] == 2  # a file is no folder
