"""Paired differences of models over test windows that overlap, and the errors of windows that jobs keep for them."""

import numpy as np
import pytest
from test_forecast_table import record

from femixer.cli import main
from femixer.reporting import as_csv, as_markdown
from femixer.tasks.forecast import TASK
from femixer.tasks.forecast.table import ERRORS, compared, difference, packed, tabulate, unpacked


def overlapping(count, horizon, draw):
    """Means of `horizon` independent rows each, as errors of windows of stride 1 are."""
    sums = np.cumsum(np.r_[0, draw.standard_normal(count + horizon - 1)])
    return (sums[horizon:] - sums[:-horizon]) / horizon


def test_errors_are_kept_to_three_digits_and_windows_without_values_stay():
    draw = np.random.default_rng(0)
    for scale in (1e-9, 1.0, 1e12):
        errors = scale * draw.exponential(size=101)
        errors[7] = np.nan
        text = packed(errors)
        np.testing.assert_allclose(unpacked(text), errors, rtol=5e-4, atol=1e-6 * scale)
        assert len(text) < 3 * 101
    assert unpacked(packed(np.zeros(5))).tolist() == [0] * 5


def test_the_spread_is_that_of_newey_and_west_written_out():
    d, horizon = overlapping(97, 5, np.random.default_rng(1)), 5
    around, lags = d - d.mean(), 10
    variance = sum(
        (1 - abs(s - t) / lags) * around[s] * around[t] for s in range(97) for t in range(97) if abs(s - t) < lags
    )
    b = lags / 97
    quantile = 1.96 + 2.9694 * b + 0.416 * b**2 - 0.5324 * b**3
    found = difference(d, horizon)
    assert found.mean == pytest.approx(d.mean()) and found.half_width == pytest.approx(quantile * variance**0.5 / 97)
    assert not difference(d[:29], horizon).is_told_apart  # below 6 horizons


def test_intervals_over_overlapping_windows_hold_the_truth_as_often_as_they_say():
    draw, horizon, count = np.random.default_rng(2), 13, 701
    samples = [overlapping(count, horizon, draw) for _ in range(400)]
    found = [difference(sample, horizon) for sample in samples]
    coverage = np.mean([not each.is_told_apart for each in found])
    independent = np.mean([abs(s.mean()) <= 1.96 * s.std() / count**0.5 for s in samples])
    assert 0.91 < coverage < 0.98
    assert independent < 0.5


def with_errors(model, seed, shift=0.0, windows=701, **fields):
    draw = np.random.default_rng(seed)  # of the windows, the same for all models
    errors = np.exp(overlapping(windows, 96, draw)) + shift
    return record(
        model, seed=seed, mse=errors.mean(), **{ERRORS: {m: packed(errors) for m in ("mse", "mae")}}, **fields
    )


def test_the_table_has_paired_differences_of_fem_and_its_prior():
    records = [with_errors("FEM-SM", seed, -0.01) for seed in (0, 1)] + [with_errors("SMAttn", s) for s in (0, 1)]
    *_, table = tabulate(records)
    assert table.header == ["Difference", "Look-back", "Horizon", "metric", "FEM-SM - SMAttn"]
    cell = table.rows[0][-1]
    assert cell.value == "-0.0100" and float(cell.error) < 1e-3 and cell.best  # though errors themselves vary by more
    assert "counts their overlap" in as_markdown(table) and "FEM-SM - SMAttn,FEM-SM - SMAttn_error\n" in as_csv(table)
    found = compared(records[:1], records[2:3], "mse", 96)
    assert found.mean == pytest.approx(-0.01, abs=1e-4)
    (worse,) = {
        row[-1].mark for row in tabulate([*records[2:], *(with_errors("FEM-SM", s, 0.01) for s in (0, 1))])[2].rows
    }
    assert worse == ""


def test_jobs_stored_before_have_no_difference_and_the_table_says_so():
    old = [record("FEM-SM"), record("SMAttn")]
    assert len(tabulate(old)) == 2
    assert "2 jobs were stored without the errors of single windows" in tabulate(old)[-1].notes[-1]
    *_, table = tabulate([*old, with_errors("FEM-SM", 1), with_errors("SMAttn", 1, 0.5)])
    assert table.rows[0][-1].value == "-0.5000" and "2 jobs were stored without" in table.notes[-1]
    assert len(tabulate([record("DLinear"), record("GLA")])) == 2  # no pair


def test_a_job_keeps_the_errors_of_its_windows(tmp_path, here):
    lines = "\n".join(f"2016-07-{1 + i // 24:02d} {i % 24:02d}:00,{np.sin(i)},{i % 7}" for i in range(211))
    (tmp_path / "waves.csv").write_text("date,a,b\n" + lines.replace(",3\n", ",\n"))  # with missing values
    run = ["forecast", "run", "--models", "LastValue", "--data", str(tmp_path / "waves.csv"), "--horizons", "5"]
    assert main([*run, "--lookback", "22", "--out", str(tmp_path / "store")]) == 0
    (kept,) = TASK.load(tmp_path / "store")
    errors = {name: unpacked(text) for name, text in kept[ERRORS].items()}
    assert {name: len(each) for name, each in errors.items()} == {"mse": 38, "mae": 38}
    assert errors["mae"].mean() == pytest.approx(kept["mae"], rel=0.05)
    assert (errors["mse"] >= errors["mae"] ** 2 * (1 - 2e-3)).all()
