"""Many series in one file (unique_id, ds, y), covariates, and cross-validation: reading, windows, commands, Python."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest
import torch
from forecasters import make

from femixer.cli import main
from femixer.models.forecast import Forecaster
from femixer.tasks.forecast.data import Reading, read
from femixer.tasks.forecast.data.windows import Held, scaling_of, windows

HORIZON, LOOKBACK = 5, 17
LENGTHS = {"b": 97, "a": 61, "short": 19, "tiny": 4}


def shops(noise=0.1):
    """Series of different lengths, levels and first days; promo is known ahead and moves y, visits are not."""
    draw, parts = np.random.default_rng(0), []
    for number, (name, rows) in enumerate(LENGTHS.items()):
        days, promo = np.arange(rows), draw.integers(0, 2, rows)
        y = 100.0**number * (5 + np.sin(2 * np.pi * days / 7) + 2 * promo + noise * draw.standard_normal(rows))
        first = pd.Timestamp("2024-01-01") + pd.Timedelta(days=11 * number)
        columns = {"ds": pd.date_range(first, periods=rows), "y": y, "promo": promo, "visits": days % 7}
        parts.append(pd.DataFrame({"unique_id": name, **columns}))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shops.csv"
    shops().to_csv(path, index=False)
    return path


COVARIATES = Reading(known=("promo",), past=("visits",))


def test_rows_of_series_may_stand_in_any_order_and_gaps_are_missing_values(tmp_path, file):
    whole = read(str(file), COVARIATES)
    assert [(s.name, s.rows) for s in whole.sections] == [*LENGTHS.items()] and whole.columns == ("y",)
    assert whole.told == () and whole.covariates.shape == (181, 2)
    frame = shops()
    kept = frame.drop([3, 4, 130])  # two of b, one of a
    kept.sample(frac=1, random_state=0).sort_values("unique_id", key=lambda ids: ids.map([*LENGTHS].index)).to_csv(
        tmp_path / "holes.csv", index=False
    )
    holes = read(str(tmp_path / "holes.csv"), COVARIATES)
    assert holes.told == ("holes.csv: 3 rows are missing in 2 of 4 series, and are missing values",)
    assert holes.sections == whole.sections and (holes.dates == whole.dates).all()
    assert np.flatnonzero(np.isnan(holes.values[:, 0])).tolist() == [3, 4, 130]
    np.testing.assert_array_equal(np.delete(holes.values, [3, 4, 130], 0), np.delete(whole.values, [3, 4, 130], 0))
    assert read(str(file)).told == ("shops.csv: promo, visits not used; --known and --past name covariates",)
    renamed = frame.rename(columns={"unique_id": "shop", "y": "sales"})[["shop", "ds", "sales"]]
    renamed.to_parquet(tmp_path / "renamed.parquet")
    other = read(str(tmp_path / "renamed.parquet"), Reading(id_column="shop"))
    assert other.columns == ("sales",) and other.sections == whole.sections


@pytest.mark.parametrize(
    ("change", "reading", "told"),
    [
        (lambda f: pd.concat([f, f.iloc[[5]]]), {}, r"line 183: b 2024-01-06 00:00:00 is there twice, first in line 7"),
        (lambda f: f.assign(unique_id=f.unique_id.where(f.index != 7)), {}, "line 9: unique_id is missing"),
        (
            lambda f: f.assign(ds=f.ds.where(f.index != 120, f.ds + pd.Timedelta("6h"))),
            {},
            r"line 122: .* of a does not",
        ),
        (lambda f: f[(f.unique_id != "a") | (f.index % 2 == 0)], {}, "a has steps of 2D, and other series of D"),
        (lambda f: f.groupby("unique_id").head(2), {}, "no series with dates of one frequency"),
        (lambda f: f, {"known": ("price",)}, "known='price' is not allowed; choose different ones of y, promo, visits"),
        (lambda f: f, {"known": ("promo",), "past": ("promo",)}, "promo is there twice"),
        (lambda f: f, {"columns": ("y", "promo")}, "columns=.* a long file has one column to forecast"),
        (lambda f: f, {"id_column": "shop"}, "id_column='shop' is not allowed"),
    ],
)
def test_what_is_wrong_with_a_long_file_is_said_in_one_line(tmp_path, change, reading, told):
    change(shops()).to_csv(tmp_path / "bad.csv", index=False)
    with pytest.raises(ValueError, match=told) as error:
        read(str(tmp_path / "bad.csv"), Reading(**reading))
    assert "\n" not in str(error.value)


def test_windows_stay_within_their_series_and_short_ones_are_unobserved_on_the_left(file):
    series = read(str(file), COVARIATES)
    split, scaling = windows(series, LOOKBACK, HORIZON)
    lengths = np.repeat(np.arange(4), [*LENGTHS.values()])
    spread = (series.values[:, 0] - scaling.mean[lengths, 0]) / scaling.std[lengths, 0]
    seen = {name: [] for name in split}
    for name, each in split.items():
        batch = each.take(torch.arange(each.count))
        known, past = batch.covariates["known"], batch.covariates["past"]
        assert known.shape == (each.count, LOOKBACK + HORIZON, 1) and past.shape == (each.count, LOOKBACK, 1)
        for i in range(each.count):
            row = int(np.flatnonzero(np.isclose(spread, batch.future[i, 0, 0].item(), atol=1e-5))[0])
            section = next(s for s in series.sections if s.begin <= row < s.end)
            assert row + HORIZON <= section.end
            there = min(LOOKBACK, row - section.begin)
            np.testing.assert_allclose(batch.history[i, LOOKBACK - there :, 0], spread[row - there : row], atol=1e-5)
            assert batch.observed[i, :, 0].tolist() == [False] * (LOOKBACK - there) + [True] * there
            promo = series.covariates[row - there : row + HORIZON, 0]
            shown = known[i, LOOKBACK - there :, 0] * scaling.covariate_std[0] + scaling.covariate_mean[0]
            np.testing.assert_allclose(shown, promo, atol=1e-5)
            seen[name].append((section.name, row - section.begin))
    # by shares of 70, 10 and 20 %, at least a horizon each; `tiny` has too few rows
    assert {n for n, _ in seen["train"]} == {n for n, _ in seen["test"]} == {"b", "a", "short"}
    assert [row for n, row in seen["test"] if n == "short"] == [14] and ("b", 17) in seen["train"]
    ends = {"b": 97 - 19 - 11, "a": 61 - 12 - 7, "short": 19 - 5 - 5}
    for name, end in ends.items():
        assert max(row for n, row in seen["train"] if n == name) == end - HORIZON
        rows = series.values[[s.name == name for s in series.sections for _ in range(s.rows)]][:end]
        np.testing.assert_allclose(scaling.mean[[*LENGTHS].index(name)], rows.mean())


@pytest.mark.parametrize("long", [False, True])
def test_held_windows_end_with_the_last_row_and_nothing_before_sees_them(file, long):
    series = read(str(file)) if long else read(str(file), Reading(columns=("y",), id_column=None))
    frame = shops()[lambda f: f.unique_id == "b"]
    if not long:
        frame.drop(columns="unique_id").to_csv(file, index=False)
        series = read(str(file), Reading(columns=("y",)))
    held = Held(3, 4)
    split, scaling = windows(series, LOOKBACK, HORIZON, held=held)
    changed = series.values.copy()
    for section in series.sections or (type("b", (), {"begin": 0, "end": 97}),):
        changed[max(section.begin, section.end - held.rows(HORIZON)) : section.end] *= 7
    other, again = windows(type(series)(**{**vars(series), "values": changed}), LOOKBACK, HORIZON, held=held)
    np.testing.assert_array_equal(scaling.std, again.std)
    for name in ("train", "validation"):
        mine, theirs = (each[name].take(torch.arange(each[name].count)) for each in (split, other))
        assert torch.equal(mine.history, theirs.history) and torch.equal(mine.future, theirs.future)
    futures = split["test"].take(torch.arange(3)).future[..., 0]
    own = (series.values[:97, 0] - scaling.mean[0]) / scaling.std[0]
    np.testing.assert_allclose(futures, [own[end - HORIZON : end] for end in (89, 93, 97)], atol=1e-5)


# Python


def test_a_model_reads_the_covariates_of_each_patch_and_the_known_ones_of_the_next():
    torch.manual_seed(0)
    model = make(known_covariates=["k"], past_covariates=["p", "q"])
    history, known, past = torch.randn(2, 41, 3), torch.randn(2, 48, 1), torch.randn(2, 41, 2)
    forecast = model(history, known=known, past=past)
    for values, row in ((known, 47), (known, 0), (past, 40), (past, 3)):
        changed = values.clone()
        changed[0, row] += 1
        given = {"known": known, "past": past, **({"known": changed} if values is known else {"past": changed})}
        moved = (model(history, **given) - forecast).abs().amax((1, 2))
        assert moved[0] > 1e-6 and moved[1] == 0
    # An output at a patch knows nothing of covariates after the patch that it forecasts.
    patches = model.patched(history, None, model_covariates(model, history, known, past))
    later = known.clone()
    later[:, 14 - 1 + 7 :] += 5  # after the third patch
    outputs = [
        model.outputs(model.patched(history, None, model_covariates(model, history, k, past))) for k in (known, later)
    ]
    torch.testing.assert_close(*(x[:, :, :2] for x in outputs))
    assert (outputs[0] - outputs[1])[:, :, 2].abs().max() > 1e-4 and patches.covariates is not None
    short = model(history[:, -9:], known=known[:, -16:], past=past[:, -9:])
    assert short.shape == forecast.shape
    for wrong, told in (
        ({}, "known is missing"),
        ({"known": known, "past": past[:, :3]}, r"past has shape \(2, 3, 2\)"),
    ):
        with pytest.raises(ValueError, match=told):
            model(history, **wrong)
    with pytest.raises(ValueError, match="made without covariates"):
        make()(history, known=known)


def model_covariates(model, history, known, past):
    from femixer.models.forecast.window import covariates_of

    return covariates_of(model.config, history, known, past)


LONG = {"channels": 1, "lookback": 17, "horizon": 5, "columns": ["y"], "id_column": "unique_id", "frequency": "D"}


def test_each_series_of_a_frame_is_forecast_as_it_would_be_alone():
    scale = {name: [5.0 * 100**i, 100.0**i] for i, name in enumerate(LENGTHS) if name != "tiny"}
    model = make(**LONG, series_scale=scale, label="Mine")
    frame = shops()[["unique_id", "ds", "y"]]
    found = model.predict(frame.sample(frac=1, random_state=1))
    assert [*found.columns] == ["unique_id", "ds", "Mine"] and len(found) == 4 * 5
    for name in LENGTHS:
        own = frame[frame.unique_id == name].drop(columns="unique_id")
        part = found[found.unique_id == name]
        assert (part.ds.to_numpy() == pd.date_range(own.ds.max(), periods=6)[1:].to_numpy()).all()
        mean, std = scale.get(name) or (own.y.mean(), own.y.std(ddof=0))  # training did not know `tiny`
        alone = make(**{**LONG, "id_column": None}, scaler_mean=[mean], scaler_std=[std]).predict(own)
        np.testing.assert_allclose(part.Mine, alone.y, rtol=1e-4)


def test_known_covariates_must_be_there_for_every_date_and_what_is_missing_is_said():
    model = make(**LONG, series_scale={}, known_covariates=["promo"])
    frame = shops()[lambda f: f.unique_id.isin(["a", "b"])][["unique_id", "ds", "y", "promo"]]
    dates = {name: pd.date_range(own.ds.max(), periods=6)[1:] for name, own in frame.groupby("unique_id")}
    future = pd.concat([pd.DataFrame({"unique_id": n, "ds": d, "promo": 1.0}) for n, d in dates.items()])
    found = model.predict(frame, future)
    assert not np.allclose(found.fem, model.predict(frame, future.assign(promo=0.0)).fem)
    for wrong, told in (
        (None, "future=None is not allowed; choose a frame with promo at the 5 time stamps"),
        (future[future.unique_id == "a"], "future has no rows of b"),
        (future.iloc[:-1], r"future of b has no value of promo for .* \(1 of 5 dates"),
        (future.assign(promo=np.nan), r"future of b has no value of promo for .* \(5 of 5 dates"),
        (pd.concat([future, future]), "future of b has .* twice"),
        (future.drop(columns="promo"), "future has no column 'promo'"),
    ):
        with pytest.raises(ValueError, match=told):
            model.predict(frame, wrong)
    with pytest.raises(ValueError, match="history has no column 'promo', a covariate"):
        model.predict(frame.drop(columns="promo"), future)
    with pytest.raises(ValueError, match="future='DataFrame' is not allowed; choose None: this model has no known"):
        make(**LONG, series_scale={}).predict(frame, future)
    with pytest.raises(ValueError, match=r"history='ndarray'.*a frame with the covariates promo"):
        model.predict(np.zeros((9, 1)))


def test_covariates_of_a_wide_frame_are_scaled_and_stand_beside_their_rows():
    fields = {"known_covariates": ["k"], "past_covariates": ["p"], "covariate_mean": [3.0, -1.0]}
    model = make(**fields, covariate_std=[2.0, 5.0], columns=["a", "b", "c"])
    draw = np.random.default_rng(0)
    dates = pd.date_range("2024-01-01", periods=48, freq="h")
    whole = pd.DataFrame(draw.standard_normal((48, 5)), index=dates, columns=["p", "a", "k", "b", "c"])
    history = whole.iloc[:41].copy()
    history.iloc[[5, 9]] = np.nan
    found = model.predict(history.dropna(), whole[["k"]])
    values = torch.tensor(history[["a", "b", "c"]].to_numpy(), dtype=torch.float32)[None]
    known = (torch.tensor(whole[["k"]].to_numpy(), dtype=torch.float32)[None] - 3) / 2
    known[:, [5, 9]] = torch.nan
    past = (torch.tensor(history[["p"]].to_numpy(), dtype=torch.float32)[None] + 1) / 5
    expected = model(values, ~values.isnan(), known=known, past=past)[0].detach()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (found.index == dates[41:]).all() and [*found.columns] == ["a", "b", "c"]


# The commands


SMALL = "--horizon 5 --lookback 17 --width 16 --layers 1 --heads 2 --batch 16 --threads 1 --lr 1e-2"


def command(text, *paths):
    return main([*shlex.split(text), *map(str, paths)])


def test_a_model_of_many_series_with_covariates_is_trained_and_predicts(tmp_path, file, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    train = f"forecast train {SMALL} --epochs 12 --known promo --past visits --quantiles 0.1 0.9 --data"
    assert command(train, file, "--out", run) == 0
    shown = capsys.readouterr()
    assert "1 of 4 series, with fewer than 16 rows, are not trained on: tiny" in shown.err
    errors = {row[0]: float(row[1]) for row in re.findall(r"\| ([\w-]+) \|.* ([\d.]+) \| [\d.]+ \|\n", shown.out)}
    assert errors["FEM-SM"] < 0.7 * errors["SeasonalNaive"] and errors["ETS"] < errors["LastValue"]
    assert "Intervals (quantiles) hold of the test values: " in shown.out
    frame, coming = shops(), tmp_path / "future.csv"
    ahead = [
        pd.DataFrame({"unique_id": n, "ds": pd.date_range(own.ds.max(), periods=6)[1:], "promo": 1})
        for n, own in frame.groupby("unique_id")
    ]
    pd.concat(ahead).to_csv(coming, index=False)
    predict = f"forecast predict --model {run} --data {file} --levels 80 --out {out}"
    assert command(predict, "--future", coming) == 0
    assert "Intervals: quantiles" in capsys.readouterr().out
    found = pd.read_csv(out / "forecast.csv", parse_dates=["ds"])
    assert [*found.columns] == ["unique_id", "ds", "FEM-SM", "FEM-SM-lo-80", "FEM-SM-hi-80"]
    assert (found["FEM-SM-lo-80"] < found["FEM-SM-hi-80"]).all() and found.unique_id.nunique() == 4
    expected = Forecaster.from_pretrained(run / "model").predict(frame, pd.concat(ahead), levels=[80])
    np.testing.assert_allclose(found.iloc[:, 2:], expected.iloc[:, 2:], rtol=1e-5)
    without = [each.assign(promo=0) for each in ahead]
    lower = Forecaster.from_pretrained(run / "model").predict(frame, pd.concat(without))
    moved = (expected["FEM-SM"] - lower["FEM-SM"])[expected.unique_id == "b"].mean()
    assert 1 < moved < 3  # 2 is the truth
    assert command(predict) == 2
    assert "future=None is not allowed; choose a file with promo of the dates" in capsys.readouterr().err
    assert command(predict, "--future", coming, "--intervals", "conformal") == 0
    assert "Intervals: conformal" in capsys.readouterr().out
    assert command(predict + " --past visits", "--future", coming) == 2
    assert "past=('visits',) is not allowed; choose none: the model has its own, visits" in capsys.readouterr().err
    assert command("forecast train --model dlinear --known promo --horizon 5 --lookback 17 --data", file) == 2
    assert "known=['promo'] is not allowed; choose none with DLinear" in capsys.readouterr().err


@pytest.mark.parametrize("refit", ["", "--refit"])
def test_cross_validation_scores_every_window_from_what_came_before_it(tmp_path, file, capsys, refit):
    out = tmp_path / "cv"
    cv = f"forecast cv --model LastValue --horizon 5 --lookback 17 --n-windows 3 --step-size 4 {refit} --out {out}"
    cv = f"{cv} --data"
    assert command(cv, file) == 0
    shown, frame = capsys.readouterr().out, pd.read_csv(out / "cv.csv", parse_dates=["ds", "cutoff"])
    assert [*frame.columns] == ["unique_id", "ds", "cutoff", "y", "LastValue"]
    whole = shops().set_index(["unique_id", "ds"]).y
    for (name, cutoff), own in frame.groupby(["unique_id", "cutoff"]):
        assert (own.ds == pd.date_range(cutoff, periods=6)[1:]).all()
        np.testing.assert_allclose(own.LastValue, whole[name, cutoff], rtol=1e-5)
        np.testing.assert_allclose(own.y, whole[name].reindex(own.ds), rtol=1e-6)
    assert frame.groupby("unique_id").cutoff.nunique().to_dict() == {"a": 3, "b": 3, "short": 3}
    ends = frame.groupby("unique_id").ds.max()
    assert all(ends[name] == whole[name].index.max() for name in ends.index)
    rows = re.findall(r"\| LastValue \| (.*?) \| ([\d.]+) \| ([\d.]+) \|", shown)
    assert len(rows) == 4 and rows[-1][0] == "all windows" and rows[0][0].endswith("to 2024-03-24 00:00:00")
    if not refit:
        scale = scaling_of(read(str(file)), HORIZON, Held(3, 4)).std[:3, 0]
        error = ((frame.y - frame.LastValue) / frame.unique_id.map(dict(zip(LENGTHS, scale, strict=False)))).abs()
        assert float(rows[-1][2]) == pytest.approx(error.mean(), abs=1e-4)
    assert command(cv, file, "--resume") == 0 and capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--n-windows 0", "n_windows=0 is not allowed"),
        ("--step-size 0", "step_size=0 is not allowed"),
        (
            "--model FEM-SM --quantiles 0.9 0.1 --levels 80",
            "quantiles=[0.9, 0.1] is not allowed; choose ascending numbers",
        ),
        ("--n-windows 40", "horizon=5 is not allowed; choose less: a series needs"),
        (
            "--levels 42",
            "levels=[42.0] is not allowed; choose levels of one kind, of which this model has: no quantiles",
        ),
    ],
)
def test_impossible_cross_validations_are_refused_in_one_line(tmp_path, file, capsys, options, told):
    cv = f"forecast cv --model LastValue --horizon 5 --lookback 17 {options} --out {tmp_path / 'cv'} --data"
    assert command(cv, file) == 2
    assert told in capsys.readouterr().err
