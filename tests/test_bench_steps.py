"""Properties of the benchmarks of training steps, vision and forecasting: equal sizes, whole steps timed, ratios the
right way round."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from femixer import bench
from femixer.bench import measure
from femixer.bench.calls import Training
from femixer.bench.steps import (
    FORECAST,
    Forecast,
    Report,
    StepCost,
    Vision,
    forecast_tables,
    measure_vision,
    vision_tables,
)
from femixer.models.named import parameter_count

TINY = Vision(preset="digits", batch=3, rounds=2, warmup=0, threads=1, priors=("softmax",))


def test_the_default_is_deit_tiny_against_plain_attention_with_as_many_parameters() -> None:
    options = Vision()
    assert options.batch == 8 and options.contestants[0] == "attention"
    attention, *fem = (parameter_count(options.config(prior)) for prior in options.contestants)
    assert all(1 <= count / attention < 1.02 for count in fem)
    assert options.config("attention").image_size == 224
    assert options.config("gla:decay=channel").prior_options == {"gla": {"decay": "channel"}}
    assert replace(options, image_size=96, positions="rotary", parts="LT").config("gla").parts == "LT"


def test_a_step_learns_its_batch_and_leaves_no_gradients() -> None:
    torch.manual_seed(0)
    batch = TINY.images()
    assert batch["pixel_values"].shape == (3, 1, 8, 8) and batch["labels"].max() < 10
    training = Training.start(TINY.model("softmax"), batch, False)
    model: Any = training.call
    assert model.training and training.parameters == model.num_parameters()
    losses = []
    for _ in range(4):
        losses.append(model(**batch).loss.item())
        assert training.time() > 0
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ratios_are_of_times_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"attention": [1.0, 2.0, 4.0], "softmax": [1.1, 2.2, 5.0]}
    monkeypatch.setattr(measure, "race", lambda samples, *_: {key: seconds[key] for key in samples})
    attention, fem = measure_vision(TINY)["training"]
    assert (attention.ratio.median, fem.ratio.median) == (1, pytest.approx(1.1))
    assert fem.seconds.median == 2.2 and fem.parameters > attention.parameters


def report(**changes: object) -> Report:
    settings = {**asdict(Vision()), "image_size": 224, **changes}
    rounds = [1.0] * 3
    costs = [
        StepCost.of("plain attention", "attention", 5, rounds, rounds),
        StepCost.of("FEM softmax CLTG", "softmax", 5, [1.2] * 3, rounds),
        StepCost.of("FEM gla CLTG", "gla", 5, [1.1] * 3, rounds),
    ]
    return Report(settings, {"threads": 1, "torch": "2"}, costs)


def rows(given: Report, targets: bool) -> list[Any]:
    (table,) = vision_tables(given, targets)
    return table.rows


def test_the_target_is_an_upper_limit_for_softmax_at_its_size_only() -> None:
    assert [row[-1] for row in rows(report(), True)] == [
        "1",
        "1.200 [1.200–1.200] > 1.15",
        "1.100 [1.100–1.100]",
    ]
    for changes in ({"batch": 4}, {"parts": "LTG"}, {"image_size": 96}, {"preset": "deit-small"}, {"device": "cuda"}):
        assert not any(">" in row[-1] for row in rows(report(**changes), True))
    assert not any(">" in row[-1] for row in rows(report(), False))
    assert rows(report(), True)[1][2:4] == ["1200", "6.7"]


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--preset", "digits", "--batch", "3", "--rounds", "2", "--warmup", "0", "--threads", "1"]
    assert bench.main(["vision", *size, "--priors", "softmax", "gla", "--targets", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "vision.json").read_text())
    assert set(written) == {"benchmark", "settings", "environment", "training"}
    assert written["settings"]["image_size"] == 8
    assert [cost["key"] for cost in written["training"]] == ["attention", "softmax", "gla"]
    for cost in written["training"]:
        assert len(cost["samples"]) == 2 and min(cost["samples"]) > 0
    shown, text = capsys.readouterr().out, (tmp_path / "vision.md").read_text()
    for part in ("plain attention", "FEM softmax CLTG", "digits, 8 x 8 pixels, batch 3"):
        assert part in shown and part in text


SERIES: dict[str, Any] = {
    "batch": 3,
    "rounds": 2,
    "warmup": 0,
    "threads": 1,
    "channels": 2,
    "lookback": 29,
    "horizon": 7,
}


def test_models_are_timed_side_by_side_and_an_epoch_has_all_windows(tmp_path: Path):
    report = FORECAST.run(Forecast(**SERIES, windows=10, out=tmp_path))
    attention, fem = report.training
    assert (attention.name, fem.name) == ("SMAttn", "FEM-SM") and attention.ratio.median == 1
    ratios = [a / b for a, b in zip(fem.samples, attention.samples, strict=True)]
    assert fem.ratio.median == pytest.approx(sum(ratios) / 2)
    (table,) = forecast_tables(report, True)
    row = table.rows[1]
    assert float(str(row[3])) == pytest.approx(4 * fem.seconds.median, abs=0.05)
    assert ">" not in row[4], "the target is for another size"
    written = json.loads((tmp_path / "forecast.json").read_text())
    assert written["training"][1]["samples"] == [*fem.samples]
