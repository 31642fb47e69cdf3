"""Kernels compile for GPUs that are not here, without spills and within their shared memory: each of those that causal
layers with heads of 64 channels run. `femixer doctor --compile` does all forms, widths, modes and targets."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from femixer.cli import main
from femixer.kernels.triton_compile import Usage

SCRIPT = Path(__file__).parent / "compile_kernels.py"


def run(folder: Path, *args: str) -> Any:
    """In a process without the interpreter, whose compiled kernels stay in a folder of the test."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args], env=variables, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Every kernel of causal layers on every target, in one of the types: in both it would take twice as long.
PRIORS = ("softmax", "gla", "decay", "mamba:normalize=false", "mamba-interactive")
TYPES = {
    "sm_80": ("bfloat16", "float32", "bfloat16", "float32", "float32"),
    "sm_90": ("bfloat16", "bfloat16", "float32", "bfloat16", "float32"),
    "gfx942": ("float32", "float32", "bfloat16", "float32", "bfloat16"),
}
KERNELS = 53
OPERATORS = {"channel_scan", "conditioner", "decayed_linear", "gates", "modulation", "pair_state_space", "rotary"}
OPERATORS |= {"rotary_angles", "softmax", "softmax_step", "softplus", "state_space", "unnormalized"}


@pytest.mark.parametrize("target", TYPES)
def test_kernels_of_layers_compile_without_spills(target: str, tmp_path: Path) -> None:
    found = run(tmp_path, target, *map(":".join, zip(PRIORS, TYPES[target], strict=True)))
    assert [line for line in found["lines"] if line.startswith("wrong")] == []
    assert found["looked"] == len(PRIORS)
    labels = [label for label in found["labels"] if not label.startswith("kernels.")]
    assert {label.partition(".")[0] for label in labels} == OPERATORS
    assert len(labels) >= KERNELS - 1


def test_a_kernel_that_spills_is_found_and_compiled_as_it_would_run(tmp_path: Path) -> None:
    found = run(tmp_path, "spilling")
    assert found["problem"].startswith("spills ")
    pointers = {"X": "*fp32", "Y": "*fp32"}
    assert found["types"] == [{**pointers, "free": "i32", "fixed": "i32"}, {**pointers, "free": "i32"}]
    assert found["aligned"] == [["X", "Y", "fixed"], ["Y"]]
    assert found["constants"] == [{"N": 128}, {"N": 128, "fixed": 1}]


def test_workers_end_when_the_command_is_killed(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "femixer", "doctor", "--compile", "--targets", "sm_90", "--operators", "softmax"]
    running = psutil.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers: list[psutil.Process] = []
        while len(workers) < 2 and running.poll() is None:
            time.sleep(0.2)
            workers = [each for each in running.children() if "spawn_main" in " ".join(each.cmdline())]
        assert len(workers) >= 2
    finally:
        running.kill()
        running.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_what_is_too_much_depends_on_the_family() -> None:
    usage = Usage(registers=128, spills=0, shared=80 * 1024)
    assert usage.problem("sm_120") is None
    assert usage.problem("gfx942") == "81920 bytes of shared memory, 65536 are the most"
    assert usage._replace(spills=8).problem("sm_120") == "spills 8 bytes"


def test_what_was_compiled_is_kept_in_a_file_of_choice(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    known = tmp_path / "compiled.jsonl"
    command = [sys.executable, "-m", "femixer", "doctor", "--compile", "--targets", "sm_90", "--operators", "softplus"]
    command += ["--known", str(known)]

    def told() -> str:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        return done.stdout + done.stderr

    assert ", 0 of them compiled before" in told()
    lines = known.read_text().splitlines()
    assert {json.loads(line)[-2] for line in lines} == {"sm_90"}
    assert all(json.loads(line)[-1].startswith("softplus.") for line in lines)
    with known.open("a") as file:
        file.write('["cut of')  # by a run that was stopped
    assert f"{len(lines)} kernels, {len(lines)} of them compiled before" in told()
    known.write_text("# Not of this kind\n\n")
    assert "is not a file of compiled kernels" in told()
    assert known.read_text() == "# Not of this kind\n\n"


def test_what_is_interpreted_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compile"]) == 2
    assert "compile=True cannot be done: TRITON_INTERPRET=1 is set" in capsys.readouterr().err
