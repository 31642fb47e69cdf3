"""`femixer mad run`: the models and scores of MAD, its jobs, the store they end in, and who carries them out."""

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from started import Started
from torch import nn

from femixer.cli import main
from femixer.models.named import NAMED
from femixer.tasks.mad import IGNORE, TASK, TASKS, fit
from femixer.tasks.mad.fit import Examples, MadJob, macro_accuracy, score
from femixer.tasks.mad.model import build, positions
from femixer.tasks.mad.protocol import PROTOCOLS, Plan, Protocol
from femixer.tasks.mad.task import Experiment
from femixer.training import Part, RunOptions, jobs, store
from femixer.training.distributed import carried_out
from femixer.training.jobs import Assignment, attempt, divided
from femixer.training.seeding import Epochs

SIZES = {"width": 12, "heads": 2, "layers": 1, "inner": 11, "validation": 5, "test": 7, "resumable": False}
TINY = Protocol(
    "tiny",
    **SIZES,
    evaluations=2,
    plans={
        "recall": Plan({"length": 14, "vocabulary": 6, "train": 7}, 3, 4, (1e-2,), (0.0, 0.1)),
        "compression": Plan({"length": 5, "vocabulary": 7, "train": 7}, 3, 4, (1e-2,), (0.0,)),
    },
)
RUN = ("mad", "run", "--protocol", "tiny", "--tasks", "recall", "--models", "SMAttn")


@pytest.fixture(autouse=True)
def tiny(monkeypatch, here):
    """A protocol of jobs that take no time, carried out in this process unless a test asks for others."""
    monkeypatch.setitem(PROTOCOLS, "tiny", TINY)


def run(out, *options):
    return main([*RUN, "--out", str(out), *map(str, options)])


def records(out):
    return [timeless(record) for record in TASK.load(out)]


def timeless(record):
    return {**record, "seconds": 0}


def tiny_job(**changes):
    return replace(Experiment(("SMAttn",), ("recall",), "tiny").jobs()[0], **changes)


# Scores


def naive_macro_accuracy(predicted, targets):
    pairs = [(p, t) for p, t in zip(predicted, targets, strict=True) if t != IGNORE]
    accuracies = []
    for c in {c for pair in pairs for c in pair}:
        of_class = [p == t for p, t in pairs if t == c]
        accuracies.append(sum(of_class) / len(of_class) if of_class else 0.0)
    return sum(accuracies) / len(accuracies) if accuracies else 0.0


@pytest.mark.parametrize("number", [0, 1, 2, 13, 101])
def test_macro_accuracy_is_the_mean_over_classes_that_are_asked_or_answered(number):
    draw = random.Random(number)
    predicted = [draw.randrange(11) for _ in range(number)]
    targets = [draw.choice([IGNORE, draw.randrange(5), p]) for p in predicted]
    found = macro_accuracy(torch.tensor(predicted, dtype=torch.long), torch.tensor(targets, dtype=torch.long), 11)
    assert float(found) == pytest.approx(naive_macro_accuracy(predicted, targets))


def test_a_class_that_is_only_predicted_counts_as_never_right():
    assert float(macro_accuracy(torch.tensor([3, 3, 4]), torch.tensor([3, 3, 3]), 7)) == pytest.approx((2 / 3 + 0) / 2)


def test_a_score_is_the_mean_of_batches_of_128_and_the_loss_that_of_positions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(131, 3, 5, generator=generator)
    targets = torch.randint(5, (131, 3), generator=generator).masked_fill(torch.rand(131, 3) < 0.3, IGNORE)
    # The stand-in for a model looks its answers up by the number of the sequence, which is its input.
    found = score(lambda rows, use_cache: SimpleNamespace(logits=logits[rows]), Examples(torch.arange(131), targets))
    batches = [(logits[rows].argmax(-1).flatten(), targets[rows].flatten()) for rows in (slice(128), slice(128, 131))]
    first, rest = (naive_macro_accuracy(p.tolist(), t.tolist()) for p, t in batches)
    assert found["accuracy"] == pytest.approx((128 * first + 3 * rest) / 131)
    chances = logits.log_softmax(-1)
    losses = [-float(chances[n, t, c]) for n in range(131) for t in range(3) if (c := int(targets[n, t])) != IGNORE]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses))


# Models


def test_compression_decodes_every_position_from_the_last_vector_and_the_position():
    model = build("compression", tiny_job(task="compression").fields, 0)
    tokens = torch.randint(6, (3, 5))
    logits = model(tokens).logits
    last = model.encoder(tokens).last_hidden_state[:, -1]
    for t in range(5):
        embedding = [math.sin(t * 10000 ** (-i / 5)) for i in range(6)] + [
            math.cos(t * 10000 ** (-i / 5)) for i in range(6)
        ]
        torch.testing.assert_close(logits[:, t], model.decoder(last + torch.tensor(embedding)))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 6
    assert not torch.allclose(model(changed).logits[:, 4], logits[:, 4])  # the first token is in that vector
    assert positions(3, 5).shape == (3, 5) and not positions(3, 5)[:, 4].any()


def test_starting_weights_depend_on_the_seed_alone():
    weights = [nn.utils.parameters_to_vector(build("recall", tiny_job().fields, s).parameters()) for s in (0, 0, 1)]
    torch.rand(3)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_every_row_of_the_papers_tables_can_be_run():
    Experiment(tuple(NAMED), ("compression",)).validate()
    Experiment(tuple(NAMED), ("recall",), "baseline").validate()


# Jobs


def test_the_protocols_have_the_jobs_of_the_original():
    full, baseline = (Experiment(("FEM-SM",), protocol=name).jobs() for name in ("full", "baseline"))
    assert len(full) == 66 * 6 and len(baseline) == 6 * 6
    assert {(job.lr, job.weight_decay) for job in full} == {(a, b) for a in (1e-4, 5e-4, 1e-3) for b in (0.0, 0.1)}
    assert {job.task: job.steps for job in baseline} == {**dict.fromkeys(TASKS, 20000), "memorization": 400}
    assert {job.steps for job in full if job.parameters["train"] == 800} == {200 * 7}
    assert all(job.steps == 200 * job.evaluate_every and job.batch == 128 for job in full)
    assert len(Experiment(tuple(NAMED), seeds=3).jobs()) == len(NAMED) * 6 * 3


def test_no_two_jobs_share_a_name_whatever_they_differ_in():
    one = tiny_job()
    other = {
        str: lambda value: value + "x",
        int: lambda value: value + 1,
        float: lambda value: value + 1e-9,
        dict: lambda value: {**value, next(iter(value)): 17},
    }
    changed = [replace(one, **{f.name: other[type(v)](v)}) for f in fields(MadJob) for v in (getattr(one, f.name),)]
    assert len({job.name for job in (one, *changed)}) == 1 + len(fields(MadJob))
    assert tiny_job().name == one.name


def test_options_that_change_a_protocol_change_its_name():
    (job,) = Experiment(("SMAttn",), ("recall",), "tiny", weight_decay=(0.3,), steps=5, length=12).jobs()
    assert job.protocol == "tiny length=12 steps=5"
    assert (job.steps, job.parameters["length"], job.weight_decay) == (5, 12, 0.3)
    lengths = Experiment(("SMAttn",), ("recall",), "full", length=64).jobs()
    assert len(lengths) == (11 - 3) * 6  # settings that differ in the length alone are one


def test_parts_are_all_jobs_once():
    all_jobs = Experiment(tuple(NAMED), seeds=2).jobs()
    parts = [divided(all_jobs, f"{i}/7") for i in range(1, 8)]
    assert sorted(job.name for part in parts for job in part) == sorted(job.name for job in all_jobs)
    assert max(map(len, parts)) - min(map(len, parts)) == 1 - (len(all_jobs) % 7 == 0)
    assert all(len({job.model for job in part}) > len(NAMED) / 2 for part in parts)


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    examples = Examples(torch.arange(7)[:, None], torch.arange(7)[:, None] + 100)
    numbers = Epochs(7, 3, seed=5, even=False)
    epochs = [[examples.rows(numbers(3 * epoch + step, Part())) for step in (1, 2, 3)] for epoch in range(2)]
    orders = [torch.cat([batch.inputs[:, 0] for batch in epoch]).tolist() for epoch in epochs]
    assert all(sorted(order) == [*range(7)] for order in orders) and orders[0] != orders[1]
    assert [len(batch.inputs) for batch in epochs[0]] == [3, 3, 1]
    assert all(torch.equal(batch.targets, batch.inputs + 100) for batch in epochs[1])
    assert torch.equal(Epochs(7, 3, seed=5, even=False)(5, Part()), epochs[1][1].inputs[:, 0])


# Training


def test_a_job_records_both_splits_and_stops_once_both_are_solved(tmp_path, monkeypatch):
    easy = {"length": 6, "vocabulary": 6, "train": 11}
    hard = tiny_job(task="memorization", parameters=easy, steps=400, evaluate_every=20, batch=11, lr=3e-2)
    options = RunOptions(tmp_path / "run", resume=True, keep=1)
    record = hard.carry_out(options)
    steps = [at["step"] for at in record["evaluations"]]
    assert steps == [*range(0, steps[-1] + 1, 20)] and 20 <= steps[-1] < 160
    solved = [at["validation"]["accuracy"] > 0.999 and at["test"]["accuracy"] > 0.999 for at in record["evaluations"]]
    assert solved == [False] * (len(steps) - 1) + [True]
    assert not fit.solved([{"accuracy": 1.0}, {"accuracy": 0.999}])
    assert record["steps"] == 400 and record["parameter_count"] > 0
    # Killed after the last evaluation, it does not go on when it is resumed.
    monkeypatch.setattr(fit, "summed_loss", None)
    assert timeless(hard.carry_out(options)) == timeless(record)


def test_a_job_that_diverges_is_recorded_as_far_as_it_came(tmp_path):
    record = tiny_job(lr=1e30).carry_out(RunOptions(tmp_path / "run", keep=0))
    assert [at["step"] for at in record["evaluations"]] == [0]
    assert "at step 2; a smaller learning rate may help" in record["diverged"]


def test_a_resumable_job_that_was_stopped_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    whole = tiny_job(steps=6, evaluate_every=2)
    expected = whole.carry_out(RunOptions(tmp_path / "whole", keep=0))
    assert not (tmp_path / "whole/checkpoints").exists()
    asked, original = [], fit.score

    def stopping(model, examples):
        asked.append(len(examples.inputs))
        if len(asked) == 6:
            raise KeyboardInterrupt
        return original(model, examples)

    monkeypatch.setattr(fit, "score", stopping)
    options = RunOptions(tmp_path / "stopped", resume=True, keep=1)
    with pytest.raises(KeyboardInterrupt):
        whole.carry_out(options)
    found = whole.carry_out(options)
    assert timeless(found) == timeless(expected)
    assert len(asked) == 6 + 4  # steps 0 and 2 were not evaluated again


# The store


def test_finished_jobs_are_not_repeated(tmp_path, monkeypatch, capsys):
    assert run(tmp_path) == 0
    first = {path: path.read_text() for path in tmp_path.glob("jobs/*")}
    assert len(first) == 2 and not [*tmp_path.glob("running/*")]
    shown = capsys.readouterr()
    assert "2/2 jobs" in shown.err and "| SMAttn |" in shown.out
    assert run(tmp_path, "--models", "SMAttn", "FEM-SM", "--seeds", 2, "--dry-run") == 0
    assert capsys.readouterr().out == "8 jobs, 2 of them finished\n"
    with monkeypatch.context() as patch:
        patch.setattr(MadJob, "carry_out", None)
        assert run(tmp_path, "--select", "test") == 0
    assert {path: path.read_text() for path in tmp_path.glob("jobs/*")} == first
    before, written = records(tmp_path), {path: path.stat().st_mtime_ns for path in first}
    assert run(tmp_path, "--overwrite") == 0
    assert records(tmp_path) == before
    assert all(path.stat().st_mtime_ns > when for path, when in written.items())  # the seconds may well be the same


def test_a_table_goes_to_no_folder_of_a_run_or_store(tmp_path, capsys):
    assert run(tmp_path / "store") == 0
    before = sorted(tmp_path.rglob("*"))
    assert main(["mad", "table", "--results", str(tmp_path / "store"), "--out", str(tmp_path / "store")]) == 2
    assert "choose a folder of its own: this one holds a run, a store of results or a model" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_overwriting_is_refused_while_another_process_is_at_a_job(tmp_path, capsys):
    assert run(tmp_path) == 0
    held = sorted(tmp_path.glob("jobs/*.json"))
    before = {path: path.read_bytes() for path in held}
    lock = tmp_path / "running" / f"{held[-1].stem}.lock"
    code = "import filelock, sys; held = filelock.FileLock(sys.argv[1]); held.acquire(); print('there'); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", code, str(lock)], **pipes) as other:
        assert other.stdout.readline() == "there\n"
        unfinished = tmp_path / "running" / held[-1].stem
        unfinished.mkdir()
        assert run(tmp_path, "--overwrite") == 2
        assert "overwrite=True is not allowed while another process is at 'SMAttn recall" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in held} == before and unfinished.is_dir()
        other.communicate("\n")
    assert run(tmp_path, "--overwrite") == 0 and not unfinished.exists()


def test_a_failing_job_stops_no_other_and_is_named(tmp_path, capsys, monkeypatch):
    original = MadJob.carry_out

    def failing(job, options):
        return original(job, options) if job.weight_decay else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(MadJob, "carry_out", failing)
        assert run(tmp_path) == 1
    shown = capsys.readouterr()
    assert "FAILED: ZeroDivisionError" in shown.err
    (error,) = tmp_path.glob("errors/*")
    assert f"failed: {error.stem}\n" in shown.err and "Traceback" in error.read_text()
    assert [record["weight_decay"] for record in records(tmp_path)] == [0.1]
    assert run(tmp_path) == 0
    whole = records(tmp_path)
    assert len(whole) == 2 and not [*tmp_path.glob("errors/*")]
    with monkeypatch.context() as patch:  # a record that shall be replaced stays until there is another
        patch.setattr(MadJob, "carry_out", failing)
        assert run(tmp_path, "--overwrite") == 1
    assert records(tmp_path) == whole
    capsys.readouterr()
    assert run(tmp_path, "--dry-run") == 0 and run(tmp_path) == 0
    assert capsys.readouterr().out.startswith("2 jobs, 1 of them finished\n")
    assert records(tmp_path) == whole and not [*tmp_path.glob("running/*")]


def test_a_job_that_another_process_is_at_is_left_to_it(tmp_path):
    from filelock import FileLock

    assignment = Assignment(tiny_job(), store.Store(tmp_path, TASK.kind), False, "cpu", 1)
    (tmp_path / "running").mkdir()
    with FileLock(tmp_path / "running" / f"{assignment.job.name}.lock"):
        assert attempt(assignment) == jobs.Outcome(assignment.job)
    assert attempt(assignment).record is not None
    # A command that began before another one finished the job has it still on its list.
    assert attempt(assignment) == jobs.Outcome(assignment.job)
    assert len(TASK.load(tmp_path)) == 1 and not [*(tmp_path / "running").iterdir()]


def test_a_machine_that_does_not_see_the_store_works_on_its_own_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    elsewhere = store.Store(tmp_path / "elsewhere", TASK.kind)
    shutil.rmtree(tmp_path / "elsewhere")
    outcome = attempt(Assignment(tiny_job(), elsewhere, False, "cpu", 1))
    assert outcome.record is not None and (tmp_path / "disk").exists() and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", [json.dumps({"format": TASK.kind.format + 1, "records": []}), "[]", "{", None])
def test_results_of_another_version_or_kind_are_refused(tmp_path, content, capsys):
    folder, file = tmp_path / "store", tmp_path / "all.json"
    folder.mkdir()
    for path in (folder / "store.json", file) if content is not None else ():
        path.write_text(content)
    told = "was written by another version of femixer" if content and len(content) > 2 else "not "
    for path in (folder, file):
        with pytest.raises(ValueError, match=told if content is not None else "without results|does not exist"):
            TASK.load(path)
    if content is not None:
        assert run(folder) == 2
        assert told in capsys.readouterr().err and not (folder / "jobs").exists()


def test_writers_of_one_file_do_not_get_in_each_others_way(tmp_path, monkeypatch):
    commit = store.atomic.commit

    def late(partial, path):
        monkeypatch.setattr(store.atomic, "commit", commit)
        store.put(path, "other")
        commit(partial, path)

    monkeypatch.setattr(store.atomic, "commit", late)
    store.put(tmp_path / "x.json", "own")
    assert (tmp_path / "x.json").read_text() == "own" and len([*tmp_path.iterdir()]) == 1


# Engines


def test_a_process_that_dies_costs_only_its_own_task():
    tasks = [signal.SIGCONT, signal.SIGKILL, signal.SIGCONT]  # a harmless signal, and one that no process survives
    died = [isinstance(f.exception(), BrokenProcessPool) for _, f in carried_out(signal.raise_signal, tasks, 1)]
    assert died == [False, True, False]


def run_tiny(options):
    """In a process that the fixture above has not changed."""
    PROTOCOLS["tiny"] = TINY
    return main(options)


def test_after_kill_9_only_what_is_missing_is_run_to_the_same_numbers(tmp_path, capsys):
    options = [*RUN, "--out", str(tmp_path / "killed"), "--seeds", "5", "--jobs", "1"]
    process = Started(run_tiny, options)
    while len([*tmp_path.glob("killed/jobs/*.json")]) < 3:
        assert process.is_alive, process.end()
        time.sleep(0.01)
    process.kill()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/jobs/*.json")}
    assert 3 <= len(kept) < 10
    time.sleep(1)  # for the worker to notice
    assert main(options) == 0
    assert f"10 jobs, {len(kept)} of them finished before" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert run(tmp_path / "whole", "--seeds", 5) == 0
    assert records(tmp_path / "killed") == records(tmp_path / "whole")


def test_ray_gives_the_numbers_of_this_process(tmp_path, capsys):
    options = ("--tasks", "recall", "compression", "--weight-decay", 0)
    assert run(tmp_path / "here", *options) == 0
    assert run(tmp_path / "ray", *options, "--engine", "ray", "--jobs", 1) == 0
    assert records(tmp_path / "ray") == records(tmp_path / "here") and len(records(tmp_path / "ray")) == 2


def test_a_ray_cluster_that_does_not_answer_is_an_error_within_seconds(tmp_path, capsys, monkeypatch):
    original = jobs.check_reachable
    monkeypatch.setattr(jobs, "check_reachable", lambda address: original(address, 0.2))
    began = time.monotonic()
    assert run(tmp_path / "out", "--engine", "ray", "--address", "127.0.0.1:1") == 2
    assert "error: address='127.0.0.1:1': no Ray cluster answers there" in capsys.readouterr().err
    assert time.monotonic() - began < 30 and not [*tmp_path.glob("out/jobs/*")]


# Wrong input


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--models", "SMAttn", "FEM"], "models='FEM' is not allowed; choose different ones of SMAttn, "),
        (["--models", "SMAttn", "SMAttn"], "choose different ones of"),
        (["--tasks", "recal"], "tasks='recal' is not allowed; choose different ones of compression, "),
        (["--tasks"], "tasks=() is not allowed"),
        (["--protocol", "huge"], "protocol='huge' is not allowed; choose one of lite, small, baseline, full"),
        (["--seeds", 0], "seeds=0"),
        (["--steps", 0], "steps=0"),
        (["--lr", 0], "lr=0.0"),
        (["--lr", 1e300], "lr=1e+300 is not allowed; choose a number above 0 that float32 holds"),
        (["--weight-decay", -1], "weight_decay=(-1.0,)"),
        (["--length", 1], "length=1"),
        (["--vocabulary", 1], "vocabulary=1"),
        (["--train", 0], "train=0"),
        (["--jobs", 0], "jobs=0"),
        (["--threads", 0], "threads=0"),
        (["--part", "0/3"], "part='0/3' is not allowed; choose i/n with i from 1 to n"),
        (["--part", "third"], "part='third'"),
        (["--address", "auto"], "address='auto' is not allowed; choose --engine ray too"),
        (["--gpus", 1], "gpus=1.0 is not allowed; choose --engine ray too"),
    ],
)
def test_wrong_options_are_refused_before_any_job(tmp_path, options, told, capsys):
    assert run(tmp_path / "out", *options) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_address_that_is_none_and_a_folder_of_something_else_are_refused(tmp_path, capsys):
    assert run(tmp_path / "out", "--engine", "ray", "--address", "nowhere") == 2
    assert "address='nowhere' is not allowed; choose auto, host:port or ray://host:port" in capsys.readouterr().err
    (tmp_path / "thesis.tex").touch()
    assert run(tmp_path) == 2
    assert "a store of results, or a new or empty folder (this one holds out, thesis.tex)" in capsys.readouterr().err
    (tmp_path / "others/runs").mkdir(parents=True)  # a name that other programs use too
    assert run(tmp_path / "others") == 2
    assert "a store of results, or a new or empty folder (this one holds runs)" in capsys.readouterr().err
