"""Prediction intervals that hold as often as they say, and exponential smoothing against statsmodels."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from forecasters import CHANNELS, HORIZON, gaps, make, walks
from statsmodels.tsa.exponential_smoothing.ets import ETSModel

from femixer.models.forecast import ETS, ForecastConfig, Forecaster
from femixer.models.forecast.rivals import START, smoothing_of, started
from femixer.models.forecast.window import NONE, Prediction, ascending, conformal_widths, enough_for, pair, pinball
from femixer.tasks.forecast.data import Series
from femixer.tasks.forecast.fit import calibrated, coverage, fitted
from femixer.tasks.forecast.model import Sizes, Training, specified
from femixer.training import Results, RunOptions


def test_conformal_widths_hold_exactly_as_often_as_they_say_for_windows_that_are_alike():
    torch.manual_seed(0)
    count, levels = 39, (50.0, 80.0, 95.0)
    widths = conformal_widths(torch.randn(count, 97, 103), levels)  # 9991 experiments with a known law
    for level, width in zip(levels, widths, strict=True):
        holds = torch.erf(width / math.sqrt(2)).mean()
        assert holds == pytest.approx(math.ceil((count + 1) * level / 100) / (count + 1), abs=0.004)
    assert (conformal_widths(torch.randn(18, 2, 3), [95.0]) == NONE).all()  # 19 is the fewest
    assert [enough_for(level) for level in (50, 80, 95, 99)] == [1, 4, 19, 99]
    assert (conformal_widths(torch.randn(19, 2, 3), [95.0]) > 0).all()


def test_missing_errors_do_not_count_for_conformal_widths():
    torch.manual_seed(1)
    errors = torch.randn(31, 2, 3)
    errors[torch.rand(31, 2, 3) < 0.3] = math.nan
    errors[:, 1, 2] = math.nan
    found = conformal_widths(errors, [80.0])[0]
    for h in range(2):
        for c in range(3):
            seen = errors[:, h, c][~errors[:, h, c].isnan()].abs().sort().values
            expected = seen[math.ceil((len(seen) + 1) * 0.8) - 1].item() if len(seen) else NONE
            assert found[h, c].item() == expected


def test_quantiles_ascend_and_their_loss_is_least_at_the_true_ones():
    torch.manual_seed(2)
    levels = [0.05, 0.3, 0.5, 0.9]
    for dtype in (torch.float32, torch.float64):
        raw = 20 * torch.randn(7, 11, len(levels), dtype=dtype)
        spread = ascending(torch.randn(7, 11, dtype=dtype), raw)
        assert (spread.diff(dim=-1) >= 0).all()
    sample = torch.distributions.Exponential(1.0).sample((20011,)).double()
    truth = torch.tensor([-math.log(1 - p) for p in levels], dtype=torch.float64)
    least = pinball(truth.expand(20011, -1), sample, levels).mean()
    for number in range(len(levels)):
        for shift in (-0.1, 0.1):
            other = truth.clone()
            other[number] += shift
            assert pinball(other.expand(20011, -1), sample, levels).mean() > least


def test_losses_of_quantiles_pass_over_missing_values():
    model = make(quantiles=[0.1, 0.5, 0.9])
    history, future, seen = walks(), walks(length=HORIZON, seed=3), gaps((5, HORIZON, CHANNELS), seed=4)
    _, spread = model(history, quantiles=True)
    loss = pinball(spread, future, [0.1, 0.5, 0.9]) * seen
    by_hand = (loss.flatten(1).sum(1) / seen.flatten(1).sum(1).clamp_min(1)).sum()
    for garbage in (0.0, math.nan):
        model.zero_grad()
        losses = model(history, future=future.masked_fill(~seen, garbage), future_observed=seen)
        torch.testing.assert_close(losses["quantiles"], by_hand)
        losses["quantiles"].backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert (spread.diff(dim=-1) > 0).all()


def skewed(rows):
    """Independent rows, exponential: intervals of the truth are not symmetric."""
    values = np.random.default_rng(0).exponential(size=(rows, 1)) + np.sin(np.arange(rows) * 2 * np.pi / 7)[:, None]
    return Series("skewed", pd.date_range("2020", periods=rows), values, ("a",))


def test_intervals_of_a_trained_model_hold_as_often_as_they_say(tmp_path):
    data = skewed(2003)
    how = Training(epochs=4, batch=32, lr=1e-2)
    spec = specified("FEM-SM", data, 7, 49, 0, Sizes(width=16, layers=1, heads=2, dropout=0.0), how, (0.1, 0.5, 0.9))
    made = fitted(spec, data, Results("forecast", spec, RunOptions(tmp_path / "run")))
    calibrated(made.model, made.windows["validation"], 128)
    assert made.model.config.conformal_levels == [50, 80, 90, 95, 99]
    found = coverage(made.model, made.windows["test"], 128)
    assert found["quantiles"][80] == pytest.approx(80, abs=6)
    for level, share in found["conformal"].items():
        assert share == pytest.approx(level, abs=6)
    _, spread = made.model(made.windows["test"].take(torch.arange(50)).history, quantiles=True)
    low, middle, high = spread.unbind(-1)
    assert (high - middle).mean() > 1.3 * (middle - low).mean()  # 1.61 against 0.59 of the truth
    made.model.save_pretrained(tmp_path / "model")
    again = Forecaster.from_pretrained(tmp_path / "model")
    frame = data.frame()
    pd.testing.assert_frame_equal(again.predict(frame, levels=[80]), made.model.predict(frame, levels=[80]))
    assert [*again.predict(frame, levels=[80, 95]).columns] == ["a", "a-lo-80", "a-hi-80", "a-lo-95", "a-hi-95"]


def test_intervals_of_arrays_are_in_the_users_units_and_unknown_levels_are_refused():
    model = make("last-value", scaler_mean=[10.0, 0.0, 5.0], scaler_std=[2.0, 1.0, 100.0])
    history = walks(1)[0].numpy() * [2, 1, 100] + [10, 0, 5]
    with pytest.raises(ValueError, match=r"levels=\[80\].* of which this model has: no quantiles; no conformal"):
        model.predict(history, levels=[80])
    widths = torch.rand(2, HORIZON, CHANNELS) + 0.1
    widths[1, 0, 0] = NONE
    model.calibrate([80, 90], widths)
    found = model.predict(history, levels=[90, 80])
    assert isinstance(found, Prediction)
    np.testing.assert_allclose(found.forecast, model.predict(history))
    for place, own in ((0, widths[1]), (1, widths[0])):
        half = np.where(own < 0, np.inf, own) * [2, 1, 100]
        np.testing.assert_allclose(found.upper[place], found.forecast + half, rtol=1e-5)
        np.testing.assert_allclose(found.lower[place], found.forecast - half, rtol=1e-5)
    batch = model.predict(np.stack([history, history]), levels=[80])
    assert batch.lower.shape == (1, 2, HORIZON, CHANNELS) and pair(80) == (0.1, 0.9)
    for wrong, told in (([70], "conformal 80, 90"), ([80, 80], "different ones"), ([0], "levels=")):
        with pytest.raises(ValueError, match=told):
            model.predict(history, levels=wrong)
    with pytest.raises(ValueError, match="of which this model has: no quantiles"):
        model.predict(history, levels=[80], intervals="quantiles")


# Exponential smoothing


@pytest.mark.parametrize("season", [1, 7])
def test_exponential_smoothing_is_that_of_statsmodels(season):
    values = np.sin(np.arange(83) * 2 * np.pi / 7) + np.random.default_rng(0).standard_normal(83).cumsum()
    model = ETS(ForecastConfig(kind="ets", channels=1, lookback=83, horizon=11, season=season)).double()
    smoothing = (0.4, 0.05, 0.2, 0.9)
    model.smoothing.copy_(torch.tensor([smoothing], dtype=torch.float64))
    window = torch.tensor(values)[None, :, None]
    level, trend, phases = started(window, season)
    seasonal = {"seasonal": "add", "seasonal_periods": 7, "initial_seasonal": [float(x) for x in phases]}
    theirs = ETSModel(
        values,
        trend="add",
        damped_trend=True,
        initialization_method="known",
        initial_level=level.item(),
        initial_trend=trend.item(),
        **(seasonal if season > 1 else {}),
    )
    by_name = dict(
        zip(("smoothing_level", "smoothing_trend", "smoothing_seasonal", "damping_trend"), smoothing, strict=True)
    )
    expected = theirs.smooth([by_name[name] for name in theirs.param_names]).forecast(11)
    np.testing.assert_allclose(model(window)[0, :, 0], expected, rtol=1e-9)


def test_exponential_smoothing_continues_a_season_on_a_trend_and_takes_its_smoothing_from_the_training_rows():
    t = np.arange(211)
    rows = np.stack([5 + 0.1 * t + np.sin(2 * np.pi * t / 7), np.full(211, 3.0), np.full(211, np.nan)], 1)
    rows[:, 0] += 0.01 * np.random.default_rng(0).standard_normal(211)
    rows[50:60, 0] = np.nan
    model = ETS(ForecastConfig(kind="ets", channels=3, lookback=40, horizon=14, season=7))
    model.estimate([rows])
    assert model.smoothing[1:].tolist() == [pytest.approx(START)] * 2
    assert model.smoothing[0].tolist() == pytest.approx(smoothing_of(rows[:, 0], 7), rel=1e-5)
    found = model.predict(rows[:, :3])
    ahead = np.arange(211, 225)
    # The trend is damped, so only the first season is near.
    np.testing.assert_allclose(found[:7, 0], (5 + 0.1 * ahead + np.sin(2 * np.pi * ahead / 7))[:7], atol=0.5)
    np.testing.assert_allclose(found[:, 1], 3.0, rtol=1e-6)
    many = ETS(ForecastConfig(kind="ets", channels=1, lookback=40, horizon=14, season=7))
    many.estimate([rows[:, :1], rows[:99, :1], rows[:, 1:2]])
    each = [smoothing_of(column, 7) for column in (rows[:, 0], rows[:99, 0], rows[:, 1])]
    assert many.smoothing[0].tolist() == pytest.approx(np.median(each, 0), rel=1e-5)
