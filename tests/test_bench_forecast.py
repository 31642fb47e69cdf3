"""Properties of the forecasting benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest

from femixer import bench
from femixer.bench.forecast import Options, run, tables

TINY: dict[str, Any] = {"batch": 3, "rounds": 2, "warmup": 0, "threads": 1, "channels": 2, "lookback": 29, "horizon": 7}


def test_models_are_timed_side_by_side_and_an_epoch_has_all_windows(tmp_path: Path):
    report = run(Options(**TINY, windows=10, out=tmp_path))
    attention, fem = report.training
    assert (attention.name, fem.name) == ("SMAttn", "FEM-SM") and attention.ratio.median == 1
    ratios = [a / b for a, b in zip(fem.samples, attention.samples, strict=True)]
    assert fem.ratio.median == pytest.approx(sum(ratios) / 2)
    (table,) = tables(report, True)
    row = table.rows[1]
    assert float(str(row[3])) == pytest.approx(4 * fem.seconds.median, abs=0.05)
    assert ">" not in row[4], "the target is for another size"
    written = json.loads((tmp_path / "forecast.json").read_text())
    assert written["training"][1]["samples"] == [*fem.samples]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--models", "SMAttn"], "models='SMAttn' is not allowed"),
        (["--models", "FEM-SM", "FEM-SM"], "models="),
        (["--horizon", "0"], "horizon=0 is not allowed; choose a whole number above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[str], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        bench.main(["forecast", *given, "--out", str(tmp_path)])
