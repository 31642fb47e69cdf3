"""`femixer lm train` with sequences and heads divided over processes, as its users run it."""

import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from started import torchrun

from femixer.cli import main

COMMAND = Path(__file__).parent / "support" / "parallel_command.py"
SIZE = "--hidden-size 24 --layers 2 --heads 4 --prior gla softmax --context 16 --batch-tokens 64"
COURSE = "--steps 5 --evaluate-every 3 --validation-tokens 64 --sample-tokens 0 --device cpu"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    random.seed(0)
    words = ["the cat sat on the mat. ", "a dog ran far away.\n\n", "free energy mixes. "]
    text.write_text("".join(random.choices(words, k=300)))
    return ["lm", "train", "--data", str(text), *SIZE.split(), *COURSE.split()]


@pytest.fixture(scope="module")
def alone(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main([*command, "--out", str(out)]) == 0
    return out


def assert_same_run(run: Path, alone: Path) -> None:
    texts = [(folder / "metrics.jsonl").read_text() for folder in (run, alone)]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert len(records[0]) == len(records[1]) > 3
    for actual, expected in zip(*records, strict=True):
        assert (actual["split"], actual["step"]) == (expected["split"], expected["step"])
        for name in {"loss", "grad_norm", "bits_per_byte"} & {*expected}:
            assert actual[name] == pytest.approx(expected[name], rel=1e-5), (name, expected["step"])
    weights, wanted = (load_file(folder / "model" / "model.safetensors") for folder in (run, alone))
    assert {*weights} == {*wanted}
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-4)


def test_a_rank_that_dies_ends_all_and_is_named_and_one_process_goes_on(
    command: list[str], alone: Path, tmp_path: Path
) -> None:
    divided = ["--context-parallel", "2", "--tensor-parallel", "2", "--shard", "full", "--out", str(tmp_path / "run")]
    done = torchrun(4, COMMAND, 3, *command, *divided, FEMIXER_BACKEND="plain")
    assert done.returncode != 0
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", done.stderr), done.stderr[-3000:]
    saved = tmp_path / "run" / "checkpoints" / "step-00000003" / "checkpoint.json"
    assert time.time() - saved.stat().st_mtime < 60  # all others ended within a minute
    assert main([*command, "--resume", "--out", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--context-parallel 2", "processes=1 is not allowed; choose a multiple of 2 x 1"),
        ("--tensor-parallel 3", "processes=1 is not allowed; choose a multiple of 1 x 3"),
        ("--tensor-parallel 0", "tensor_parallel=0 is not allowed; choose a whole number above 0"),
        ("--tensor-parallel 2 --compile", "compile=True is not allowed; choose False with 2 processes per part"),
    ],
)
def test_bad_divisions_are_told_before_training(
    command: list[str], tmp_path: Path, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options.split(), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
