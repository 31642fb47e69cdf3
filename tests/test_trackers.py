"""Metrics in trackers: every step once, also after a crash."""

import json
from importlib.util import find_spec
from typing import get_args

import pytest
from tiny_run import ELABORATE, Crash, crash_at, tiny_run

from femixer.cli import main
from femixer.training.journal import Trackers
from femixer.training.results import RunOptions, Tracker


def test_tensorboard_shows_each_step_once_even_after_a_crash(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(Crash):
        tiny_run(tmp_path, arguments=ELABORATE, each_batch=crash_at(5), track=("tensorboard",))
    run = (tmp_path / "trackers.json").read_text()
    tiny_run(tmp_path, arguments=ELABORATE, track=("tensorboard",), resume=True)
    assert (tmp_path / "trackers.json").read_text() == run
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/line")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("line/mse")] == [0, 3, 6, 7]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [record["mse"] for record in metrics if "mse" in record]
    assert [event.value for event in events.Scalars("line/mse")] == pytest.approx(expected)
    assert "sample 0/text_summary" in events.Tags()["tensors"]


def test_a_new_run_in_the_folder_is_a_new_run_of_the_tracker(tmp_path):
    pytest.importorskip("tensorboard")
    tiny_run(tmp_path, track=("tensorboard",))
    first = json.loads((tmp_path / "trackers.json").read_text())
    tiny_run(tmp_path, track=("tensorboard",), overwrite=True, finish=True)
    assert json.loads((tmp_path / "trackers.json").read_text()) != first
    tiny_run(tmp_path, overwrite=True, finish=True)
    assert not (tmp_path / "trackers.json").exists() and not (tmp_path / "tensorboard").exists()


class Told:
    """What a tracker of accelerate was told."""

    def __init__(self):
        self.calls = []

    def log(self, values, step):
        self.calls.append((step, values))


def test_trackers_that_cannot_forget_are_not_told_again_what_they_have():
    told = {name: Told() for name in get_args(Tracker)}
    tracked = Trackers(told, known=4)
    for step in (3, 4, 5):
        tracked.log({"SMAttn+C/loss": step / 2}, step)
    tracked.log({"sample 0": "text"}, 5)
    assert [step for step, _ in told["tensorboard"].calls] == [3, 4, 5, 5]  # SummaryWriter drops what was there
    for name in ("wandb", "trackio"):
        assert told[name].calls == [(4, {"SMAttn+C/loss": 2.0}), (5, {"SMAttn+C/loss": 2.5}), (5, {"sample 0": "text"})]
    assert told["mlflow"].calls == [(4, {"SMAttn_C/loss": 2.0}), (5, {"SMAttn_C/loss": 2.5})]


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_missing_package_is_one_line_before_anything_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # which Python would import as a package without files
    monkeypatch.syspath_prepend(str(tmp_path))
    for command in (["lm", "train"], ["vision", "train"], ["forecast", "train"]):
        assert main([*command, "--out", str(tmp_path / "run"), "--track", "tensorboard", "wandb"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "error: track='wandb' needs a package that is not installed: pip install wandb"
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="track='tensorbord' is not allowed; choose from tensorboard, wandb"):
        RunOptions(tmp_path, track=("tensorbord",)).apply()
