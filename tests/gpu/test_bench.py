"""`femixer bench gpu`: the estimate is worked out as it says, and the measurement measures, here on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from femixer import FreeEnergyMixer
from femixer.baselines import Attention
from femixer.bench import gpu
from femixer.cli import main
from femixer.kernels.triton_launch import Step, traced

SMALL = ["--dim", "32", "--heads", "2", "--batch", "1", "--lengths", "16"]


def test_the_slowest_part_decides_and_a_launch_costs_something() -> None:
    card = gpu.Gpu("sm_90", 100.0, 50.0, 20.0, 10.0, 5.0, 200.0)
    half, full = torch.bfloat16, torch.float32

    def seconds(dtype: torch.dtype, ours: bool, moved: int, flops: int, exponentials: int, again: int = 0) -> float:
        return (card.seconds(Step("", ours, moved, flops, exponentials, dtype, again)) - gpu.OVERHEAD) * gpu.REACHED

    assert seconds(half, True, 300, 100, 10) == pytest.approx(3)
    assert seconds(half, True, 300, 200, 10) == pytest.approx(4)
    assert seconds(half, True, 300, 200, 25) == pytest.approx(5)
    assert seconds(half, True, 300, 200, 25, 1200) == pytest.approx(6)
    assert seconds(full, False, 0, 100, 0) == pytest.approx(10)


def test_torchs_operations_are_counted_beside_launches() -> None:
    """What can be worked out by hand: a product, an exponential; views and new memory are free."""
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    with traced() as steps:
        torch.empty(7, device="meta")
        (a @ b).T.exp()
    assert steps == [Step("mm", False, 4 * (15 + 35 + 21), 2 * 3 * 5 * 7, 0), Step("exp", False, 4 * 42, 0, 21)]


def test_attention_by_hand_has_the_work_of_the_layer() -> None:
    """Products of the projections are those of a real layer; its scores in torch without data are not halved."""
    options = gpu.Options(dim=64, heads=4, batch=2)
    by_hand = gpu.attention_traces(options, 32, torch.float32)
    real = gpu.trace(Attention(64, 4, device="meta"), 2, 32, 64, torch.float32)
    for ours, theirs in zip(by_hand, real, strict=True):
        scores = sum(step.flops for step in ours if "flash" in step.name)
        projections = sum(step.flops for step in ours) - scores
        assert sum(step.flops for step in theirs if step.name in ("mm", "addmm")) == projections
    assert sum(step.flops for step in by_hand.forward if step.name == "flash") * 2 == sum(
        step.flops for step in real.forward if step.name == "bmm"
    )


def test_an_estimate_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "gpu", "--estimate", "--kernels", "--priors", "softmax", "--out", str(tmp_path), *SMALL]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ESTIMATE, not a measurement") and "modulation.backward" in shown
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["estimate"] is True
    assert {row["gpu"] for row in report["rows"]} == {*gpu.GPUS}
    rival = next(row for row in report["rows"] if row["layer"] == "attention")
    assert rival["step ratio"] == 1


def test_a_measurement_writes_the_file_to_attach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "gpu", "--device", "cpu", "--priors", "gla", "--dtypes", "float32", "--repeats", "1"]
    assert main([*args, "--models", "tiny", "--out", str(tmp_path), *SMALL]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["layer"] for row in report["rows"]] == ["attention", "FEM gla", "tiny attention", "tiny FEM gla"]
    assert all("error" not in row and row["step ms"] > 0 for row in report["rows"])
    assert all(row["token ms"] > 0 for row in report["rows"][:2])
    assert "tokens per second" in capsys.readouterr().out


def test_a_layer_that_fails_is_told_and_the_others_are_measured(tmp_path: Path) -> None:
    options = gpu.Options(priors=("gla",), dim=32, heads=2, batch=1, lengths=(16,), repeats=1, device="cpu")
    kinds = dict(gpu.contestants(options, {"device": "cpu"}))
    assert isinstance(kinds["FEM gla"](), FreeEnergyMixer)
    broken = gpu.Options(priors=("gla",), dim=32, heads=3, batch=1, lengths=(16,), repeats=1, device="cpu")
    rows = gpu.measured(broken)
    assert rows and all("dim=32 is not divisible by heads=3" in row["error"] for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtypes", "float8"], "dtypes='float8' is not allowed; choose one of float32, bfloat16"),
        (["--lengths", "0"], "lengths=0 is not allowed"),
        ([], "torch sees no GPU; --estimate needs none"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *args]) == 2
    assert message in capsys.readouterr().err
