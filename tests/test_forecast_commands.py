"""`femixer forecast train`, `run` and `predict` as users call them: files in, forecasts, tables and refusals out."""

import math
import shlex

import numpy as np
import pandas as pd
import pytest
from forecasters import hourly, waves

from femixer.cli import main
from femixer.models.forecast import Forecaster
from femixer.tasks.forecast import TASK, fit
from femixer.tasks.forecast.data import default_lookback


@pytest.fixture
def file(tmp_path):
    """A CSV of waves."""
    path = tmp_path / "waves.csv"
    frame = pd.DataFrame(waves(211, noise=0.1), columns=["up", "down"])
    frame.insert(0, "date", hourly(211))
    frame.to_csv(path, index=False)
    return path


TRAIN = shlex.split(
    "forecast train --horizon 5 --lookback 22 --width 8 --layers 1 --heads 2 --batch 16 --threads 1 --epochs"
)
RUN = shlex.split("forecast run --models DLinear LastValue --horizons 3 5 --lookback 22 --epochs 1 --seeds 2")


def test_a_trained_model_forecasts_a_file_with_its_dates(tmp_path, file, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([*TRAIN, "2", "--model", "FEM-SM", "--data", str(file), "--out", str(run)]) == 0
    shown = capsys.readouterr()
    assert "| FEM-SM |" in shown.out and "| SeasonalNaive | 0 |" in shown.out and "Writing" not in shown.err
    assert {"config.json", "metrics.jsonl", "figure.png", "table.md", "model"} < {p.name for p in run.iterdir()}
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert all(f"## {part}" in card for part in ("Sizes", "Data", "Metrics", "Citation")) and "test MSE" in card
    assert main([*TRAIN, "2", "--model", "FEM-SM", "--data", str(file), "--out", str(run), "--resume"]) == 0
    assert main(["forecast", "predict", "--model", str(run), "--data", str(file), "--out", str(out)]) == 0
    frame = pd.read_csv(file, index_col="date", parse_dates=True)
    forecast = pd.read_csv(out / "forecast.csv", index_col="date", parse_dates=True)
    assert [*forecast.index] == [*pd.date_range(frame.index[-1], periods=6, freq="h")[1:]]
    expected = Forecaster.from_pretrained(run / "model").predict(frame)
    np.testing.assert_allclose(forecast, expected, rtol=1e-5)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "truth" not in capsys.readouterr().out


def test_a_training_that_diverges_ends_with_an_error_and_saves_no_untrained_model(tmp_path, file, capsys, monkeypatch):
    options = ["--model", "DLinear", "--data", str(file), "--horizon", "5", "--lookback", "22"]
    train = ["forecast", "train", *options, "--epochs", "2", "--threads", "1", "--lr"]
    assert main([*train, "1e30", "--out", str(tmp_path / "run")]) == 2
    assert "training diverged: the " in (said := capsys.readouterr().err) and "no model is saved" in said
    assert not {"model", "table.md"} & {path.name for path in (tmp_path / "run").iterdir()}
    # Later, the best weights before are saved, and the command says so.
    loss, steps = Forecaster.forward, []

    def diverging(self, *args, **kwargs):
        found = loss(self, *args, **kwargs)
        steps.append(isinstance(found, dict))
        return {"loss": found["loss"] * math.nan} if steps[-1] and sum(steps) > 6 else found

    monkeypatch.setattr(Forecaster, "forward", diverging)
    assert main([*train, "1e-2", "--out", str(tmp_path / "later")]) == 2
    assert "the best before, are in" in capsys.readouterr().err
    assert (tmp_path / "later" / "model" / "model.safetensors").is_file()


def test_a_forecast_may_begin_within_the_data(tmp_path, file, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    options = ["--model", "LastValue", "--data", str(file)]
    assert main(["forecast", "train", *options, "--horizon", "5", "--lookback", "22", "--out", str(run)]) == 0
    predict = ["forecast", "predict", "--model", str(run / "model"), "--data", str(file), "--out", str(out)]
    frame = pd.read_csv(file, index_col="date", parse_dates=True)
    assert main([*predict, "--start", str(frame.index[-3])]) == 0
    forecast = pd.read_csv(out / "forecast.csv", index_col="date", parse_dates=True)
    assert forecast.index[0] == frame.index[-3]
    np.testing.assert_allclose(forecast, np.tile(frame.iloc[-4], (5, 1)), rtol=1e-5)
    error = (frame.iloc[-3:] - frame.iloc[-4]).abs().mean()
    assert f"known: up {error['up']:.4g}, down {error['down']:.4g}" in capsys.readouterr().out
    assert main([*predict, "--start", str(frame.index[-1] + pd.Timedelta("1h"))]) == 0
    for start in ("2016-07-01", "2031-01-01", "soon", "2016-07-09 21:00", "2016-07-05 00:00+02:00"):
        assert main([*predict, "--start", start]) == 2
        assert f"start={start!r} is not allowed; choose a date" in capsys.readouterr().err
    file.write_text("date,up\n2016-07-01,1\n")
    assert main(predict) == 2
    assert "columns='down' is not allowed; choose different ones of up" in capsys.readouterr().err


def test_a_forecast_may_begin_after_missing_rows(tmp_path, file):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([*TRAIN, "1", "--model", "FEM-SM", "--data", str(file), "--out", str(run)]) == 0
    frame = pd.read_csv(file, index_col="date", parse_dates=True)
    start, gap = frame.index[190], slice(177, 190)  # longer than the horizon of 5
    frame.drop(frame.index[gap]).to_csv(file)
    options = ["--data", str(file), "--start", str(start), "--out", str(out)]
    assert main(["forecast", "predict", "--model", str(run), *options]) == 0
    forecast = pd.read_csv(out / "forecast.csv", index_col="date", parse_dates=True)
    frame.iloc[gap] = np.nan
    expected = Forecaster.from_pretrained(run / "model").predict(frame.iloc[:190])
    assert forecast.index[0] == start
    np.testing.assert_allclose(forecast, expected, rtol=1e-5)


def test_a_model_reads_new_files_as_that_of_its_training(tmp_path, file):
    run, out = tmp_path / "run", tmp_path / "out"
    frame = pd.read_csv(file, parse_dates=["date"])
    expected = {}
    for sentinel in ("nan", "-9999"):
        told = frame.assign(date=frame["date"].dt.strftime("%d.%m.%Y %H:%M"))
        told.loc[190:208:5, "up"] = float(sentinel)
        told.to_csv(file, index=False)
        if sentinel == "nan":
            reading = ["--date-format", "%d.%m.%Y %H:%M", "--missing-below", "-9000"]
            assert main([*TRAIN, "1", "--data", str(file), "--out", str(run), *reading]) == 0
        assert main(["forecast", "predict", "--model", str(run), "--data", str(file), "--out", str(out)]) == 0
        expected[sentinel] = pd.read_csv(out / "forecast.csv", index_col="date", parse_dates=True)
    assert expected["nan"].equals(expected["-9999"])
    assert expected["nan"].index[0] == frame["date"].iloc[-1] + pd.Timedelta("1h")
    other = ["--missing-below", "-1e5", "--out", str(out)]
    assert main(["forecast", "predict", "--model", str(run), "--data", str(file), *other]) == 0
    assert not pd.read_csv(out / "forecast.csv", index_col="date", parse_dates=True).equals(expected["nan"])
    model = Forecaster.from_pretrained(pretrained_model_name_or_path=run / "model")
    np.testing.assert_allclose(model.predict(told)[["up", "down"]], expected["nan"], rtol=1e-5)


def test_finished_jobs_are_not_repeated_wherever_the_file_lies(tmp_path, file, capsys, here, monkeypatch):
    out = tmp_path / "store"
    assert main([*RUN, "--data", str(file), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "8 jobs, 0 of them finished before" in shown.err and "| waves | 22 | mean of 3, 5 |" in shown.out
    records = TASK.load(out)
    assert len(records) == 8 and {r["seed"] for r in records} == {0, 1} and not [*out.glob("running/*")]
    moved = file.rename(tmp_path / "elsewhere" / "waves.csv") if (tmp_path / "elsewhere").mkdir() is None else file
    monkeypatch.setattr(fit, "fit", None)
    assert main([*RUN, "--data", str(moved.with_suffix("")), "--out", str(out)]) == 0
    assert "8 jobs, 8 of them finished before" in capsys.readouterr().err
    moved.write_text(moved.read_text().replace("2016-07-01 00:00:00,", "2016-07-01 00:00:00,1"))
    assert main([*RUN, "--data", str(moved), "--out", str(out), "--dry-run"]) == 0
    assert capsys.readouterr().out == "8 jobs, 0 of them finished\n"
    assert main(["forecast", "export", "--results", str(out), "--out", str(tmp_path / "all.json")]) == 0
    assert TASK.load(tmp_path / "all.json") == records
    assert main(["mad", "table", "--results", str(out)]) == 2
    assert "or by another command: its format is 'forecast 1' and here it is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--models", "DLinear", "FEM"], "model='FEM' is not allowed; choose one of SMAttn, "),
        (["--models", "DLinear", "DLinear"], "models=('DLinear', 'DLinear') is not allowed; choose different ones"),
        (["--models", "DLinear", "--width", "8"], "width=8 is not allowed; choose None: DLinear has the sizes"),
        (["--models", "foo", "--width", "8"], "model='foo' is not allowed; choose one of SMAttn, "),
        (["--models", "FEM-SM", "--width", "9"], "hidden_size=9 is not allowed"),
        (["--horizons"], "horizons=() is not allowed"),
        (["--horizons", "43"], "horizon=43 is not allowed; choose at most"),
        (["--lookback", "200"], "lookback=200 is not allowed; choose at most"),
        (["--seeds", "0"], "seeds=0"),
        (["--seed", "-1"], "seed=-1"),
        (["--epochs", "0"], "epochs=0"),
        (["--patience", "0"], "patience=0"),
        (["--lr", "0"], "lr=0.0"),
        (["--lr", "1e300"], "lr=1e+300 is not allowed; choose a number above 0 that float32 holds"),
        (["--season", "0"], "season=0"),
        (["--jobs", "0"], "jobs=0"),
        (["--data", "ETTh3"], "data='ETTh3' is neither a file nor a folder/NAME of one; . has "),
        (["--columns", "left"], "columns='left' is not allowed; choose different ones of up, down"),
        (["--columns", "up", "up"], "columns=('up', 'up') is not allowed"),
        (["--date-column", "when"], "date_column='when' is not allowed; choose one of the columns of"),
    ],
)
def test_wrong_options_are_refused_before_any_job(tmp_path, file, options, told, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "--data", str(file), "--out", str(tmp_path / "out"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_none_offers_what_the_folder_has(tmp_path, file, capsys):
    for data in (tmp_path, tmp_path / "ETTh1"):
        assert main([*TRAIN, "1", "--data", str(data)]) == 2
        told = capsys.readouterr().err
        assert f"{tmp_path} has waves; known by name are ETTh1, ETTh2" in told and "seattle-temps" in told
    assert main(["forecast", "predict", "--model", str(tmp_path)]) == 2
    assert "a results folder of `femixer forecast train`, or the model/ in it" in capsys.readouterr().err


def test_lookbacks_go_with_horizons():
    assert [default_lookback(horizon) for horizon in (1, 96, 97, 192, 336, 337, 720, 5000)] == [
        *(1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096)
    ]
