"""The training loop: what is resumed equals what was never stopped, whatever stopped it."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import Tiny, same, tiny_run
from torch import nn

from femixer.training import Interrupted, adamw, atomic, checkpoint
from femixer.training.seeding import derive, generator


class Crash(Exception):
    pass


def crash_at(step):
    def each_batch(now):
        if now == step:
            raise Crash

    return each_batch


def stored_steps(folder):
    return [int(path.name.split("-")[1]) for path in checkpoint.stored(folder / "checkpoints")]


def test_metrics_hold_step_zero_every_evaluation_and_the_end(tmp_path):
    metrics, _ = tiny_run(tmp_path)
    assert [record["step"] for record in metrics] == [0, 3, 6, 7]
    assert metrics[-1]["mse"] < metrics[0]["mse"]


def test_the_same_seed_repeats_a_run_and_another_does_not(tmp_path):
    first = tiny_run(tmp_path / "a")
    assert same(first, tiny_run(tmp_path / "b"))
    assert not same(first, tiny_run(tmp_path / "c", Tiny(seed=1)))


@pytest.mark.parametrize("step", range(1, 8))
def test_resumed_run_equals_uninterrupted_one_wherever_it_crashed(tmp_path, step):
    with pytest.raises(Crash):
        tiny_run(tmp_path / "crashed", each_batch=crash_at(step))
    torch.manual_seed(99)  # a resumed process does not inherit the state of the random numbers
    assert same(tiny_run(tmp_path / "crashed", resume=True), tiny_run(tmp_path / "whole"))


def test_resuming_does_not_repeat_the_steps_before_the_checkpoint(tmp_path):
    with pytest.raises(Crash):
        tiny_run(tmp_path, each_batch=crash_at(5))
    seen = []
    tiny_run(tmp_path, each_batch=seen.append, resume=True)
    assert seen == [4, 5, 6, 7]


def test_kill_nine_at_any_touch_of_the_disk_then_resume_equals_uninterrupted(tmp_path):
    script = Path(__file__).with_name("tiny_run.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30  # config, four evaluations and three checkpoints of several files each


def test_only_the_newest_two_checkpoints_are_kept(tmp_path):
    tiny_run(tmp_path, Tiny(steps=8, evaluate_every=2))
    assert stored_steps(tmp_path) == [8, 6]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_newest_checkpoint_warns_and_the_one_before_is_used(tmp_path, name, damage):
    with pytest.raises(Crash):
        tiny_run(tmp_path / "run", each_batch=crash_at(7))
    assert stored_steps(tmp_path / "run") == [6, 3]
    file = tmp_path / "run" / "checkpoints" / "step-00000006" / name
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[-1] ^= 0xFF  # the last byte is data: of a tensor, of the zip directory, or the closing brace
        file.write_bytes(content)
    seen = []
    with pytest.warns(UserWarning, match="step-00000006 is damaged"):
        resumed = tiny_run(tmp_path / "run", each_batch=seen.append, resume=True)
    assert seen[0] == 4
    assert same(resumed, tiny_run(tmp_path / "whole"))


def test_with_every_checkpoint_damaged_training_starts_anew(tmp_path):
    with pytest.raises(Crash):
        tiny_run(tmp_path / "run", each_batch=crash_at(5))
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "optimizer.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        resumed = tiny_run(tmp_path / "run", resume=True)
    assert same(resumed, tiny_run(tmp_path / "whole"))


def test_a_checkpoint_under_its_name_is_complete_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        assert not [*(tmp_path / "checkpoints").glob("step-*[0-9]")]  # not there before all of it is written
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        tiny_run(tmp_path)
    assert not [*(tmp_path / "checkpoints").iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_it_and_the_run_can_be_resumed(tmp_path, number):
    def signalled(step):
        if step == 4:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="after step 4 of 7"):
        tiny_run(tmp_path / "run", each_batch=signalled)
    assert signal.getsignal(number) == before
    assert stored_steps(tmp_path / "run")[0] == 4
    seen = []
    resumed = tiny_run(tmp_path / "run", each_batch=seen.append, resume=True)
    assert seen == [5, 6, 7]
    assert same(resumed, tiny_run(tmp_path / "whole"))


def test_a_second_ctrl_c_is_not_held_back(tmp_path):
    def signalled(step):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stop:
        tiny_run(tmp_path, each_batch=signalled)
    assert not isinstance(stop.value, Interrupted)


def test_an_unfinished_run_is_neither_continued_nor_deleted_unasked(tmp_path):
    with pytest.raises(Crash):
        tiny_run(tmp_path, each_batch=crash_at(5))
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"holds an unfinished run \(--resume continues it\); --overwrite"):
        tiny_run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_finished_run_says_so(tmp_path):
    tiny_run(tmp_path)
    (tmp_path / "table.md").write_text("| done |")
    with pytest.raises(ValueError, match=r"holds a finished run \(--resume shows its table\); --overwrite"):
        tiny_run(tmp_path)


def test_overwriting_starts_anew_and_spares_what_is_not_ours(tmp_path):
    tiny_run(tmp_path, Tiny(seed=1))
    (tmp_path / "table.md").write_text("| done |")
    (tmp_path / "notes.txt").write_text("mine")
    assert same(tiny_run(tmp_path, overwrite=True), tiny_run(tmp_path / "new"))
    assert not (tmp_path / "table.md").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("deletions", range(4))
@pytest.mark.parametrize("then", ["resume", "overwrite"])
def test_overwriting_can_crash_between_any_two_deletions(tmp_path, monkeypatch, deletions, then):
    whole = tiny_run(tmp_path)
    (tmp_path / "table.md").write_text("| done |")
    remove, done = atomic.remove, []

    def crashing(path):
        if len(done) == deletions:
            raise Crash
        done.append(path)
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "remove", crashing)
        with pytest.raises(Crash):
            tiny_run(tmp_path, overwrite=True)
    assert same(tiny_run(tmp_path, **{then: True}), whole)


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_of_something_else_is_refused(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"choose a new or empty folder \(this one holds thesis.tex\)"):
        tiny_run(tmp_path, **options)
    assert [*tmp_path.iterdir()] == [tmp_path / "thesis.tex"]


def test_resuming_with_other_options_names_each_of_them(tmp_path):
    tiny_run(tmp_path)
    with pytest.raises(ValueError, match=r"lr was 0.1 and is now 0.2, seed was 0 and is now 3$"):
        tiny_run(tmp_path, Tiny(lr=0.2, seed=3), resume=True)


def test_the_config_records_options_and_versions(tmp_path):
    tiny_run(tmp_path, Tiny(lr=0.25))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["task"] == "tiny"
    assert config["experiment"] == {"steps": 7, "evaluate_every": 3, "lr": 0.25, "seed": 0}
    assert config["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 0), ("steps", -1), ("evaluate_every", 0), ("lr", 0.0), ("lr", float("nan"))]
)
def test_bad_values_are_named(tmp_path, field, value):
    name = "learning_rate" if field == "lr" else field
    with pytest.raises(ValueError, match=f"^{name}={value} is not allowed; choose a .*number above 0$"):
        tiny_run(tmp_path, replace(Tiny(), **{field: value}))


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="either --resume or --overwrite"):
        tiny_run(tmp_path, resume=True, overwrite=True)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match="smaller learning rate"):
        tiny_run(tmp_path, Tiny(lr=1e30))


def test_weight_decay_is_for_matrices_and_not_for_temperatures_biases_or_norms():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 5)
            self.norm = nn.LayerNorm(5)
            self.beta_shift = nn.Parameter(torch.ones(2, 5))

    layer = Layer()
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    adamw(layer, learning_rate=0.1, weight_decay=0.5).step()
    changed = [name for name, p in layer.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["linear.weight"]
    torch.testing.assert_close(layer.linear.weight, before["linear.weight"] * 0.95)


def test_random_numbers_depend_on_seed_and_purpose_only():
    draws = {
        key: tuple(torch.rand(3, generator=generator(*key)).tolist()) for key in [(0, "a", 1), (0, "a", 2), (1, "a", 1)]
    }
    assert len(set(draws.values())) == 3
    assert tuple(torch.rand(3, generator=generator(0, "a", 1)).tolist()) == draws[0, "a", 1]
    assert derive(0, "a", 12) != derive(0, "a1", 2)
