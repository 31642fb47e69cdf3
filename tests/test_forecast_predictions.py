"""Forecasters' predictions in the user's own units, and what they refuse."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from forecasters import CHANNELS, HORIZON, LOOKBACK, gaps, make, walks
from huggingface_hub.errors import StrictDataclassError

from femixer.models.forecast import KINDS, ForecastConfig, Forecaster


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Forecaster:
    return make(request.param)


SCALER = {"scaler_mean": [10.0, -2.0, 1e5], "scaler_std": [3.0, 0.01, 1e3]}


def in_units(scaled: torch.Tensor) -> np.ndarray:
    return scaled.detach().double().numpy() * SCALER["scaler_std"] + SCALER["scaler_mean"]


def test_predict_scales_there_and_back_and_masks_nan(model):
    model = copy.deepcopy(model)
    model.config.scaler_mean, model.config.scaler_std = SCALER["scaler_mean"], SCALER["scaler_std"]
    model.train()
    scaled, observed = walks(), gaps((5, LOOKBACK, CHANNELS))
    history = np.where(observed.numpy(), in_units(scaled), np.nan)
    forecast = model.predict(history)
    assert model.training and forecast.dtype == np.float64
    expected = in_units(model.eval()(scaled, observed))
    np.testing.assert_allclose(forecast, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.predict(history[0]), forecast[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.predict(history[:, -9:])[1], model.predict(history[1, -9:]), rtol=1e-4, atol=1e-5)


def test_predict_returns_the_kind_of_array_that_it_was_given():
    model, one = make(), make(channels=1)
    assert model.predict(np.zeros((LOOKBACK, CHANNELS), dtype=np.float32)).dtype == np.float32
    assert model.predict(np.ones((2, 5, CHANNELS), dtype=int)).shape == (2, HORIZON, CHANNELS)
    assert one.predict(np.arange(50.0)).shape == (HORIZON,)
    assert one.predict([1, 2, 3]).shape == (HORIZON,)
    assert one.predict(np.arange(50.0)[:, None]).shape == (HORIZON, 1)


@pytest.mark.parametrize("start", ["2024-01-31", "2024-03-08", pd.Timestamp("2024-10-25", tz="Europe/Berlin")])
@pytest.mark.parametrize("frequency", ["h", "D", "15min", "MS", "ME", "W-WED", "B", "YS"])
def test_predict_continues_the_time_stamps_of_a_frame(start, frequency):
    model = make("last-value")
    known = pd.date_range(start, periods=30, freq=frequency, name="when", unit="s")
    frame = pd.DataFrame(walks(1, 30)[0].numpy(), index=known, columns=["a", "b", "c"])
    following = pd.date_range(start, periods=30 + HORIZON, freq=frequency, name="when", unit="s")[30:]
    frame.index.freq = None  # as it comes from a file
    forecast = model.predict(frame)
    pd.testing.assert_index_equal(forecast.index, following, check_exact=True)
    assert [*forecast.columns] == ["a", "b", "c"]
    np.testing.assert_allclose(forecast.to_numpy(), frame.to_numpy()[-1:].repeat(HORIZON, 0), rtol=1e-6)
    # The same with the dates as a column.
    pd.testing.assert_frame_equal(model.predict(frame.reset_index()), forecast.reset_index())


def test_predict_on_a_frame_gives_the_numbers_of_the_array_in_the_order_of_the_models_columns():
    model = make(columns=["a", "b", "c"], date_column="stamp", **SCALER)
    values = in_units(walks(1)[0])
    frame = pd.DataFrame(values, columns=["a", "b", "c"])
    frame.insert(0, "stamp", pd.date_range("2024-01-01", periods=LOOKBACK, freq="h").strftime("%Y-%m-%d %H:%M"))
    frame["comment"] = "fine"
    forecast = model.predict(frame[["c", "comment", "stamp", "a", "b"]])
    assert [*forecast.columns] == ["stamp", "a", "b", "c"]
    np.testing.assert_allclose(forecast[["a", "b", "c"]].to_numpy(), model.predict(values), rtol=1e-5)


@pytest.mark.parametrize("frequency", [None, "h"])
def test_a_row_that_is_missing_between_two_others_is_missing_and_not_closed_up(frequency):
    model = make(frequency=frequency)
    known = pd.date_range("2024-01-01", periods=LOOKBACK, freq="h")
    frame = pd.DataFrame(walks(1)[0].numpy(), index=known)
    holes = frame.copy()
    holes.iloc[[3, 4, 17, -2]] = np.nan
    pd.testing.assert_frame_equal(model.predict(holes.dropna()), model.predict(holes))
    assert not np.allclose(model.predict(holes), model.predict(frame))


def test_predict_on_a_series_gives_a_series_of_its_name():
    model = make(channels=1, columns=["load"])
    series = pd.Series(np.arange(50.0), index=pd.date_range("2024-01-01", periods=50, freq="D"), name="temperature")
    forecast = model.predict(series)
    assert isinstance(forecast, pd.Series) and forecast.name == "temperature"
    assert forecast.index[0] == pd.Timestamp("2024-02-20")
    np.testing.assert_allclose(forecast.to_numpy(), model.predict(series.to_numpy()), rtol=1e-5)
    series.index.freq = None
    one_row = make(channels=1, frequency="h").predict(series.iloc[:1])
    assert one_row.index[-1] == pd.Timestamp("2024-01-01 07:00") and one_row.name == "temperature"


def frame_of(dates: object, columns: str = "abc") -> pd.DataFrame:
    dates = [*dates]
    return pd.DataFrame({"date": dates, **{c: np.arange(float(len(dates))) for c in columns}})


HOURS = [*pd.date_range("2024-01-01", periods=9, freq="h")]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (np.zeros((9, 4)), r"history has shape \(9, 4\).*made for 3 channels"),
        (np.zeros(9), r"history has shape \(9,\).*made for 3 channels"),
        (np.zeros((2, 2, 9, 3)), r"history has shape \(2, 2, 9, 3\)"),
        (np.array([["x"] * 3]), "history has dtype <U1"),
        (np.full((9, 3), np.inf), "history='inf'"),
        (np.full((9, 3), np.nan), "history='9 points'.*at least one"),
        (np.zeros((0, 3)), "history='0 points'"),
        (frame_of(HOURS, "abcd"), r"history has 4 columns besides the dates \(a, b, c, d\).*made for 3"),
        (frame_of(HOURS).assign(b="x"), "history has dtype .* in column 'b'"),
        (frame_of(HOURS).drop(columns="date"), "history has 0 date columns among a, b, c"),
        (frame_of(HOURS).assign(other=HOURS), "history has 2 date columns"),
        (frame_of(["yesterday"] * 9), "history has dates in column 'date' that cannot be read"),
        (frame_of(HOURS[::-1]), "history has missing, repeated or unordered dates"),
        (frame_of([HOURS[0], *HOURS]), "history has missing, repeated or unordered dates"),
        (frame_of([*HOURS, None]), "history has missing, repeated or unordered dates"),
        (frame_of([]).astype({"date": "datetime64[ns]"}), "history has missing, repeated or unordered dates"),
        (frame_of([*HOURS, HOURS[-1] + pd.Timedelta("70min")]), "history has irregular dates: 2024-01-01 09:10:00"),
        (frame_of(HOURS[:1]), "history has one row"),
        (pd.Series(np.arange(9.0), index=HOURS), "history is a Series.*made for 3"),
        (pd.Index([1, 2]), "history is a pandas Index"),
    ],
)
def test_bad_histories_are_refused_by_name(history, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make("last-value").predict(history)


def test_a_frame_without_the_models_columns_is_refused():
    with pytest.raises(ValueError, match="history has no column 'load'; this model was made for a, b, load"):
        make("last-value", columns=["a", "b", "load"]).predict(frame_of(HOURS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"history": torch.zeros(2, 9, 4)}, r"history has shape \(2, 9, 4\)"),
        ({"history": torch.zeros(9, 3)}, r"history has shape \(9, 3\)"),
        ({"history": torch.zeros(2, 9, 3, dtype=torch.long)}, "history is torch.int64"),
        ({"observed": torch.ones(2, 8, 3, dtype=torch.bool)}, "observed of history is .*allowed is torch.bool"),
        ({"observed": torch.ones(2, 9, 3)}, "observed of history is .*torch.float32"),
        ({"future": torch.zeros(2, 6, 3)}, r"future=\(2, 6, 3\).*the horizon, 7"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()(**{"history": torch.zeros(2, 9, 3), **arguments})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "arima"}, "kind='arima'.*one of fem, dlinear"),
        ({"channels": 0}, "channels=0"),
        ({"horizon": -1}, "horizon=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"hidden_size": 20}, "hidden_size=20.*multiple of num_attention_heads=8"),
        ({"mixer": "magic"}, "mixer='magic'"),
        ({"prior": "magic"}, "prior='magic'"),
        ({"scaler_mean": [1.0]}, "scaler_mean=.*one per channel, 3"),
        ({"scaler_std": [1.0, 0.0, 2.0]}, "scaler_std=0.0.*1 for a constant channel"),
        ({"columns": ["a"]}, "columns=.*one per channel, 3"),
    ],
)
def test_impossible_configurations_are_refused_by_name(fields, message):
    with pytest.raises(StrictDataclassError) as caught:
        ForecastConfig(**{"channels": 3, **fields})
    error: BaseException | None = caught.value
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__cause__
    assert pytest.RaisesExc(ValueError, match=message).matches(ValueError(" ".join(messages)))


def test_sizes_that_are_not_given_are_the_published_ones():
    wide, small = ForecastConfig(channels=21), ForecastConfig(channels=7)
    assert (small.hidden_size, small.num_hidden_layers, small.num_attention_heads, small.dropout) == (64, 3, 8, 0.1)
    assert (wide.hidden_size, wide.intermediate_size, ForecastConfig().hidden_size) == (128, 512, 32)
    assert ForecastConfig(channels=7, num_attention_heads=5).hidden_size % 10 == 0
    assert ForecastConfig(kind="patchtst", channels=7).sizes() == (3, 4, 16, 128, 0.3)
    assert ForecastConfig(kind="patchtst", channels=21).sizes() == (3, 16, 128, 256, 0.2)
    assert ForecastConfig(kind="itransformer", channels=7, hidden_size=128).sizes() == (2, 8, 128, 128, 0.1)
    with pytest.raises(ValueError, match="lookback=15"):
        make("patchtst", lookback=15)
