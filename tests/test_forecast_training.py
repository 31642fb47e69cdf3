"""Forecasting: the windows of the protocol, errors, training to the best weights."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from forecasters import hourly, series, waves

from femixer.tasks.forecast import fit
from femixer.tasks.forecast.data import LOOKBACKS, read
from femixer.tasks.forecast.data.windows import borders, counted, scaling_of, windows
from femixer.tasks.forecast.fit import fitted, score
from femixer.tasks.forecast.model import Sizes, Training, specified
from femixer.training import Part, Results, RunOptions, loop
from femixer.training.loop import one_cycle
from femixer.training.seeding import Epochs

# Windows and splits


def test_the_windows_of_ett_are_those_of_the_protocol(tmp_path):
    rows = 17420
    frame = pd.DataFrame({"date": hourly(rows), "HUFL": np.arange(rows), "OT": np.arange(rows) % 24})
    frame.to_csv(tmp_path / "ETTh1.csv", index=False)
    hours = read(str(tmp_path / "ETTh1"))
    assert hours.name == "ETTh1" and hours.columns == ("HUFL", "OT") and len(hours.dates) == rows
    counts = {horizon: [c for _, c in counted(hours, L, horizon).values()] for horizon, L in LOOKBACKS.items()}
    assert counts == {
        96: [7521, 2785, 2785],
        192: [6401, 2689, 2689],
        336: [6257, 2545, 2545],
        720: [3825, 2161, 2161],
    }
    quarters = replace(hours, name="ETTm2", values=np.zeros((69680, 3)))
    assert [c for _, c in counted(quarters, 1024, 96).values()] == [33441, 11425, 11425]


def test_a_window_holds_the_rows_before_and_after_its_place():
    rows = 14400 + 17  # the rows after the last split are not used
    split, scaling = windows(series(np.arange(rows), "ETTh2"), 11, 5)
    for name, (begin, end) in {"train": (11, 8640), "validation": (8640, 11520), "test": (11520, 14400)}.items():
        batch = split[name].take(torch.tensor([0, split[name].count - 1]))
        expected = [np.arange(first - 11, first + 5) for first in (begin, end - 5)]
        found = torch.cat([batch.history, batch.future], 1)[..., 0].double().numpy() * scaling.std + scaling.mean
        np.testing.assert_allclose(found, expected, atol=2e-3)
        assert batch.observed is None and batch.future_observed is None
    assert len({each.values.data_ptr() for each in split.values()}) == 1  # one series, and no copy of any window


def test_other_data_are_split_by_their_length():
    assert borders(series(np.zeros(101))) == {"train": (0, 70), "validation": (70, 81), "test": (81, 101)}
    with pytest.raises(ValueError, match="ETTm1 has its splits in the first 57600 rows, and this file has 101 rows"):
        borders(series(np.zeros(101), "ETTm1"))


def test_the_scale_is_that_of_the_training_rows_alone():
    draw = np.random.default_rng(1)
    values = draw.standard_normal((101, 4)) * [1, 1e-7, 1e6, 1] + [0, 3, -1e6, 0]
    values[:, 3] = 0.1 + 0.2  # constant, but for rounding
    values[::2, 3] = 0.3
    values[3, 0] = np.nan
    changed = values.copy()
    changed[70:] = changed[70:] * 1e9 + 1
    one, other = scaling_of(series(values)), scaling_of(series(changed))
    np.testing.assert_array_equal(one.mean, other.mean)
    np.testing.assert_array_equal(one.std, other.std)
    np.testing.assert_allclose(one.mean[:3], np.nanmean(values[:70, :3], 0))
    np.testing.assert_allclose(one.std[:3], np.nanstd(values[:70, :3], 0))
    assert one.std[3] == 1
    split, _ = windows(series(values), 7, 3)
    assert bool(split["train"].values.isfinite().all()) and split["train"].values[:, 3].abs().max() < 1e-15


@pytest.mark.parametrize(
    ("rows", "lookback", "horizon", "told"),
    [
        (101, 68, 3, "lookback=68 is not allowed; choose at most 67 with horizon 3: mine has 70 rows in its train"),
        (10, 5, 7, "horizon=7 is not allowed; choose at most 6: mine has 7 rows in its train split"),
        (101, 5, 12, "horizon=12 is not allowed; choose at most 11: mine has 11 rows in its validation split"),
        (101, 0, 3, "lookback=0"),
        (101, 5, 0, "horizon=0"),
        (3, 1, 1, "mine has 3 rows, too few for a test split"),
        (1, 1, 1, "mine has 1 rows, too few for a train split"),
    ],
)
def test_windows_that_do_not_fit_are_refused(rows, lookback, horizon, told):
    with pytest.raises(ValueError, match=told):
        counted(series(np.arange(rows)), lookback, horizon)
    assert counted(series(np.arange(101)), 67, 3)["train"] == (67, 1)


def test_an_epoch_has_every_window_once_in_batches_of_one_size():
    split, _ = windows(series(np.arange(101)), 7, 3)
    order = Epochs(split["train"].count, 13, seed=5)
    assert order.per_epoch == 5 and split["train"].count == 61

    def batch(step, part):
        return split["train"].take(order(step, part)).future[:, 0, 0]

    epochs = [[batch(5 * epoch + step, Part()) for step in range(1, 6)] for epoch in range(2)]
    orders = [torch.cat(epoch) for epoch in epochs]
    assert all(len({*order.tolist()}) == 61 for order in orders) and not torch.equal(*orders)
    assert {len(batch) for batch in epochs[0]} == {12, 13}
    halves = [batch(7, Part(i, 2)) for i in range(2)]
    assert torch.equal(torch.cat(halves), epochs[1][1])


# Errors and rates


def test_errors_are_means_over_all_known_values_of_all_windows():
    values = waves(101)
    values[[13, 77, 85, 85, 90], [0, 1, 0, 1, 1]] = np.nan
    split, _ = windows(series(values), 7, 3)
    test = split["test"]

    def last(history, observed):
        return history[:, -1:].expand(-1, 3, -1) * observed[:, -1:]

    scaled = test.values.double().numpy()
    scaled[np.isnan(values)] = np.nan
    errors = []
    for row in range(81, 99):
        before = np.nan_to_num(scaled[row - 1])
        errors += [value for value in (before - scaled[row : row + 3]).ravel() if not math.isnan(value)]
    for batch in (1, 5, 64):
        found = score(last, test, batch, "test")
        assert found["mse"] == pytest.approx(np.mean(np.square(errors)), rel=1e-5)
        assert found["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-5)
    values[70:] = np.nan
    with pytest.raises(ValueError, match="everything in them is missing"):
        score(last, windows(series(values), 7, 3)[0]["test"], 5, "test")


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 0.05), (37, 0.3)])
def test_the_rate_is_torchs_one_cycle(steps, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.7)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.7, total_steps=steps, pct_start=warmup, anneal_strategy="linear", cycle_momentum=False
    )
    ours = one_cycle(steps, warmup)
    for step in range(1, steps + 1):
        assert 0.7 * ours(step) == pytest.approx(cycle.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < steps:
            cycle.step()
    assert [one_cycle(1)(1), one_cycle(3)(1)] == [1.0, 1.0]


# Training


SMALL = Training(epochs=5, patience=2, batch=16, lr=1e-2)


def small(model="DLinear", data=None, **changes):
    data = data or series(waves(211, noise=0.1))
    spec = specified(model, data, 5, 22, 0, Sizes(width=8, layers=1, heads=2), SMALL)
    return replace(spec, **changes), data


def carry_out(folder, model="DLinear", resume=False, **changes):
    spec, data = small(model, **changes)
    return fitted(spec, data, Results("forecast", spec, RunOptions(folder, resume=resume)))


def test_a_linear_series_is_learned_and_beats_the_naive_forecasts(tmp_path):
    how = replace(SMALL, epochs=30, patience=30)
    errors = {
        model: carry_out(tmp_path / model, model, training=how).record
        for model in ("DLinear", "SeasonalNaive", "LastValue")
    }
    assert errors["DLinear"]["mse"] < 0.01 < 0.5 < errors["SeasonalNaive"]["mse"]
    assert errors["SeasonalNaive"]["best_step"] == errors["SeasonalNaive"]["steps"] == 0
    # The naive forecast is better where it is right about the season.
    other = carry_out(tmp_path / "77", "SeasonalNaive", season=77, lookback=100).record
    assert other["mse"] < 0.01


def scripted(monkeypatch, errors, stop_at=None):
    """Validation errors from a script, with the weights that each was given for; the test split is scored as it is."""
    seen, original = [], fit.score

    def fake(model, split, batch, what=""):
        if int(split.places[0]) == 169:  # the first row of the test split
            return original(model, split, batch, what)
        if stop_at is not None and len(seen) == stop_at:
            raise KeyboardInterrupt
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"mse": errors[len(seen) - 1], "mae": 1.0}

    monkeypatch.setattr(fit, "score", fake)
    return seen


def same_weights(model, weights):
    state = model.state_dict()
    return all(torch.equal(state[name], weights[name]) for name in weights)


def test_training_stops_without_progress_and_keeps_the_best_weights(tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [9.0, 3.0, 2.0, 7.0, 2.0, 1.0])
    made = carry_out(tmp_path)
    per_epoch = math.ceil(made.windows["train"].count / 16)
    assert len(seen) == 5 and made.record["steps"] == 4 * per_epoch  # equal is not better
    assert made.record["best_step"] == 2 * per_epoch and made.record["validation_mse"] == 2.0
    assert same_weights(made.model, seen[2]) and not same_weights(made.model, seen[4])
    assert made.record["mse"] == fit.score(made.model.eval(), made.windows["test"], 7)["mse"]
    # The test error is in the journal once, though the run is finished anew.
    again = carry_out(tmp_path, resume=True)
    assert again.record == made.record and same_weights(again.model, seen[2]) and len(seen) == 5
    splits = [json.loads(line)["split"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert splits.count("test") == 1 and splits[-1] == "test"


def test_an_error_that_is_not_a_number_ends_training_with_the_best_before(tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [9.0, 3.0, math.nan, 2.0])
    made = carry_out(tmp_path)
    assert len(seen) == 3 and "mse is nan" in made.record["diverged"]
    assert made.record["validation_mse"] == 3.0 and same_weights(made.model, seen[1])
    scripted(monkeypatch, [math.nan])
    with pytest.raises(FloatingPointError, match="not even the first"):
        carry_out(tmp_path / "hopeless")


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_run_that_was_stopped_ends_with_the_same_best_weights(tmp_path, monkeypatch, stop_at):
    errors = [9.0, 3.0, 2.0, 5.0, 4.0]
    with monkeypatch.context() as patch:
        whole = scripted(patch, errors)
        expected = carry_out(tmp_path / "whole")
    with monkeypatch.context() as patch:
        first = scripted(patch, errors, stop_at)
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path / "stopped")
    done = len(first) if stop_at > 1 else 0  # step 0 has no checkpoint
    rest = scripted(monkeypatch, errors[done:])
    made = carry_out(tmp_path / "stopped", resume=True)
    assert done + len(rest) == len(whole) == 5
    assert {**made.record, "seconds": 0} == {**expected.record, "seconds": 0}
    assert same_weights(made.model, whole[2])


def test_a_crash_after_the_best_weights_and_before_their_checkpoint_loses_nothing(tmp_path, monkeypatch):
    """The resumed run may find another error by rounding, and then needs the best weights from before."""
    seen = scripted(monkeypatch, [9.0, 3.0, 5.0, 2.0])
    save = loop.Best._save

    def crash(self, weights, step, keep):
        save(self, weights, step, keep)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Best, "_save", crash)
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path)
    scripted(monkeypatch, [4.0])
    made = carry_out(tmp_path, resume=True)
    assert made.record["validation_mse"] == 3.0 and same_weights(made.model, seen[1])


def test_a_training_that_diverges_is_recorded_with_its_best_weights(tmp_path):
    record = carry_out(tmp_path, training=replace(SMALL, lr=1e30)).record
    assert "a smaller learning rate may help" in record["diverged"] and math.isfinite(record["mse"])


def test_missing_values_and_constant_channels_can_be_trained_on(tmp_path):
    values = waves(211, 3)
    values[:, 1] = 7.0
    values[np.random.default_rng(2).random((211, 3)) < 0.2] = np.nan
    record = carry_out(tmp_path, "FEM-SM", data=series(values)).record
    assert math.isfinite(record["mse"]) and record["diverged"] is None
    assert record["evaluations"][-1]["mse"] < record["evaluations"][0]["mse"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((slice(None), np.nan), "the column 'c1' has no value in the 70 training rows; choose --columns without it"),
        ((slice(70), np.nan), "the column 'c1' has no value in the 70 training rows"),
        ((slice(3, 5), [1e200, -1e200]), "the column 'c1' has values up to 1e+200, too large to scale"),
        ((slice(90, 91), 1e60), r"the column 'c1' has the value 1e+60 in row 91, \d.* deviations of the training rows"),
    ],
)
def test_a_channel_without_values_or_with_too_large_ones_is_named(change, told):
    values = waves(101)
    values[change[0], 1] = change[1]
    with pytest.raises(ValueError, match=told.replace("+", r"\+")):
        windows(series(values), 7, 3)
