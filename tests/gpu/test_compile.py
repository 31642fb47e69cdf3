"""Kernels compile for GPUs that are not here, without spills and within their shared memory: a layer of every prior
with heads of 64 channels. `femixer doctor --compile` does all widths, modes and targets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from femixer.cli import main
from femixer.kernels.triton_compile import Usage

SCRIPT = Path(__file__).parent / "compile_kernels.py"


def run(folder: Path, *args: str) -> Any:
    """In a process without the interpreter, whose compiled kernels stay in a folder of the test."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args], env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What is open: it may only become less.
OPEN = "wrong: decayed_linear.read on sm_90: spills 8 bytes"


# Each prior once, so that it takes a minute; every prior on every target is `femixer doctor --compile`.
@pytest.mark.parametrize(
    ("target", "dtype", "priors"),
    [
        ("sm_80", "bfloat16", ["softmax"]),
        ("sm_80", "float32", ["aft"]),
        ("sm_90", "float32", ["gla"]),
        ("gfx942", "bfloat16", ["mamba"]),
    ],
)
def test_kernels_of_layers_compile_without_spills(target: str, dtype: str, priors: list[str], tmp_path: Path) -> None:
    found = run(tmp_path, target, dtype, *priors)
    wrong = [line for line in found["lines"] if line.startswith("wrong") and not line.startswith(OPEN)]
    assert wrong == []
    assert {"conditioner.features", "modulation.forward", "modulation.backward"} <= set(found["labels"])


def test_a_kernel_that_spills_is_found_and_compiled_as_it_would_run(tmp_path: Path) -> None:
    found = run(tmp_path, "spilling")
    assert found["problem"].startswith("spills ")
    pointers = {"X": "*fp32", "Y": "*fp32"}
    assert found["types"] == [{**pointers, "free": "i32", "fixed": "i32"}, {**pointers, "free": "i32"}]
    assert found["aligned"] == [["X", "Y", "fixed"], ["Y"]]
    assert found["constants"] == [{"N": 128}, {"N": 128, "fixed": 1}]


def test_what_is_too_much_depends_on_the_family() -> None:
    usage = Usage(registers=128, spills=0, shared=80 * 1024)
    assert usage.problem("sm_120") is None
    assert usage.problem("gfx942") == "81920 bytes of shared memory, 65536 are the most"
    assert usage._replace(spills=8).problem("sm_120") == "spills 8 bytes"


def test_what_is_interpreted_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compile"]) == 2
    assert "compile=True cannot be done: TRITON_INTERPRET=1 is set" in capsys.readouterr().err
