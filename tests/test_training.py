"""The training loop: what is resumed equals what was never stopped, whatever stopped it."""

import io
import json
import resource
import signal

import pytest
import torch
from started import Started
from tiny_run import ELABORATE, Crash, Tiny, crash_at, crash_everywhere, same, tiny_run
from torch import nn

from femixer.training import (
    EngineOptions,
    Interrupted,
    Part,
    adamw,
    atomic,
    checkpoint,
    constant,
    cosine,
    derive,
    full_weights,
    generator,
)
from femixer.training.engine import Engine
from femixer.training.journal import Display, sample_text


def stored_steps(folder):
    return [int(path.name.split("-")[1]) for path in checkpoint.stored(folder / "checkpoints")]


def test_the_same_seed_repeats_a_run_and_another_does_not(tmp_path):
    first = tiny_run(tmp_path / "a")
    assert same(first, tiny_run(tmp_path / "b"))
    assert not same(first, tiny_run(tmp_path / "c", Tiny(seed=1)))


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("arguments", [{}, ELABORATE], ids=["plain", "elaborate"])
def test_resumed_run_equals_uninterrupted_one_wherever_it_crashed(tmp_path, step, arguments):
    with pytest.raises(Crash):
        tiny_run(tmp_path / "crashed", each_batch=crash_at(step), arguments=arguments)
    torch.manual_seed(99)  # a resumed process does not inherit the state of the random numbers
    resumed = tiny_run(tmp_path / "crashed", arguments=arguments, resume=True)
    assert same(resumed, tiny_run(tmp_path / "whole", arguments=arguments))


def test_resuming_does_not_repeat_the_steps_before_the_checkpoint(tmp_path):
    with pytest.raises(Crash):
        tiny_run(tmp_path, each_batch=crash_at(5))
    seen = []
    tiny_run(tmp_path, each_batch=seen.append, resume=True)
    assert seen == [4, 5, 6, 7]


def test_kill_nine_at_any_touch_of_the_disk_then_resume_equals_uninterrupted(tmp_path):
    ended = Started(crash_everywhere, tmp_path).end()
    assert ended.code == 0, ended.err
    assert int(ended.out) > 50  # config, three evaluations, two records and four checkpoints of several files each


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    tiny_run(tmp_path / "two", Tiny(steps=8, evaluate_every=2))
    assert stored_steps(tmp_path / "two") == [8, 6]
    tiny_run(tmp_path / "more", Tiny(steps=8, evaluate_every=4), keep=3, save_every=3)
    assert stored_steps(tmp_path / "more") == [8, 6, 4]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "checkpoint.json"])
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
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        resumed = tiny_run(tmp_path / "run", resume=True)
    assert same(resumed, tiny_run(tmp_path / "whole"))


def test_a_checkpoint_under_its_name_is_complete_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        assert not [*(tmp_path / "checkpoints").glob("step-*[0-9]")]  # not there before all of it is written
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "checksum", fail)
    with pytest.raises(OSError, match=r"step-00000003 could not be saved \(no space left\)"):
        tiny_run(tmp_path)
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_a_full_disk_spares_the_last_checkpoint_and_the_run_can_be_resumed(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step):
        if step == 5:  # the system refuses to write files beyond this size: not even the weights fit
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))

    try:
        with pytest.raises(OSError, match=r"step-00000006 could not be saved \(.*File too large.*before it are intact"):
            tiny_run(tmp_path / "run", each_batch=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert same(tiny_run(tmp_path / "run", resume=True), tiny_run(tmp_path / "whole"))


def test_a_checkpoint_of_another_model_is_refused_by_the_name_and_shape_of_what_differs(tmp_path):
    def saved(model):
        checkpoint.save(tmp_path, model, adamw(model, 0.1), checkpoint.Position(1))

    saved(nn.Linear(3, 5))
    wider = nn.Linear(3, 7)
    with pytest.raises(ValueError, match=r"is of another model: weight is \(5, 3\) there and \(7, 3\) in the model"):
        checkpoint.restore(tmp_path, wider, adamw(wider, 0.1))
    other = nn.Linear(3, 5, bias=False)
    with pytest.raises(ValueError, match=r"bias is \(5,\) there and missing in the model"):
        checkpoint.restore(tmp_path, other, adamw(other, 0.1))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, again = tied(), tied()
    checkpoint.save(tmp_path, model, adamw(model, 0.1), checkpoint.Position(1))
    assert [*checkpoint.weights(tmp_path / "step-00000001")] == ["0.weight"]
    checkpoint.restore(tmp_path, again, adamw(again, 0.1))
    assert torch.equal(again[1].weight, model[0].weight) and again[1].weight is again[0].weight
    weights = full_weights(model)
    assert [*weights] == ["0.weight", "1.weight"] and weights["0.weight"] is weights["1.weight"]


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

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job may have been told to ignore it
    try:
        with pytest.raises(KeyboardInterrupt) as stop:
            tiny_run(tmp_path, each_batch=signalled)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(stop.value, Interrupted)


def test_an_unfinished_run_is_neither_continued_nor_deleted_unasked(tmp_path):
    with pytest.raises(Crash):
        tiny_run(tmp_path, each_batch=crash_at(5))
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"holds an unfinished run \(--resume continues it\); --overwrite"):
        tiny_run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    (tmp_path / "table.md").write_text("| done |")
    with pytest.raises(ValueError, match=r"holds a finished run \(--resume shows its table\); --overwrite"):
        tiny_run(tmp_path)


def test_several_files_take_the_place_of_others_all_at_once(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(FileNotFoundError), atomic.replacing_files(folder) as new:
        (new / "a").rename(new / "b")
    assert not folder.exists()
    (folder / "figures").mkdir(parents=True)
    for name in ("a", "table", "mine", "figures/old.png", "figures/mine.txt"):
        (folder / name).write_text("before")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for fails in (True, False):
        try:
            with atomic.replacing_files(folder, "table", "figures/*.png") as new:
                (new / "figures").mkdir()
                for name in ("a", "table", "figures/new.png"):
                    (new / name).write_text("after")
                assert {path: path.read_bytes() for path in before} == before
                assert not fails or 1 / 0
        except ZeroDivisionError:
            assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    after = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    new = dict.fromkeys(("a", "table", "figures/new.png"), "after")
    assert after == {**new, "mine": "before", "figures/mine.txt": "before"}


def test_a_folder_takes_the_place_of_another(tmp_path):
    for content in ("one", "two"):
        with atomic.replacing(tmp_path / "model") as partial:
            partial.mkdir()
            (partial / content).write_text(content)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "two"]


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
    ("name", "value", "allowed"),
    [
        ("steps", 0, "a whole number above 0"),
        ("evaluate_every", -1, "a whole number above 0"),
        ("log_every", 0, "a whole number above 0"),
        ("clip", 0.0, "a number above 0"),
        ("items", 0, r"a batch that has any \(step 1\)"),
        ("accumulate", 0, "a whole number above 0"),
        ("precision", "fp8", "no or bf16"),
        ("shard", "half", "none or full"),
        ("checkpointing", True, "False: Sequential does not offer it"),
    ],
)
def test_bad_arguments_are_named(tmp_path, name, value, allowed):
    engine = {"engine": EngineOptions(**{name: value})} if name in EngineOptions.__dataclass_fields__ else {}
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not allowed; choose {allowed}$"):
        tiny_run(tmp_path, arguments=engine or {name: (lambda part: 0) if name == "items" else value})


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="either --resume or --overwrite"):
        tiny_run(tmp_path, resume=True, overwrite=True)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is (inf|nan) at step 2; a smaller learning rate may help"):
        tiny_run(tmp_path, Tiny(lr=1e30), save_every=1)
    assert stored_steps(tmp_path) == [1]  # and replaces no checkpoint


def test_gradients_that_are_not_finite_stop_the_run_before_their_weights_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "clip", lambda engine, largest: torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match="norm of the gradients is nan at step 3"):
        tiny_run(tmp_path)
    assert stored_steps(tmp_path) == []


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


def test_embeddings_decay_as_the_output_matrix_does_frozen_parameters_never_and_betas_are_used():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7), nn.Linear(7, 2))
    model[2].requires_grad_(False)
    optimizer = adamw(model, 0.1, 0.5, betas=(0.7, 0.8))
    decayed, spared = optimizer.param_groups
    assert {*map(id, decayed["params"])} == {id(model[0].weight), id(model[1].weight)}
    assert {*map(id, spared["params"])} == {id(model[1].bias)}
    assert decayed["betas"] == (0.7, 0.8) and (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    with pytest.raises(ValueError, match="betas="):
        adamw(model, 0.1, betas=(0.9, 1.0))
    allowed = "choose a number above 0 that float32 holds"
    with pytest.raises(ValueError, match=rf"learning_rate=1e\+300 is not allowed; {allowed}"):
        adamw(model, 1e300)


def test_the_learning_rate_rises_linearly_and_falls_as_half_a_cosine():
    factors = [cosine(11, 3, 0.2)(step) for step in range(1, 12)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[6] == pytest.approx(0.6)  # halfway between 3 and 11, in the middle of 1 and 0.2
    assert factors[-1] == pytest.approx(0.2)
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert cosine(4)(4) == 0 and cosine(4, 4)(4) == 1 and constant(9) == 1
    for bad in ({"warmup": 12}, {"warmup": -1}, {"floor": 1.1}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}="):
            cosine(11, **bad)


def test_the_scheduled_rate_is_the_one_that_is_used(tmp_path):
    frozen = tiny_run(tmp_path / "a", arguments={"schedule": lambda step: 0.0 if step > 3 else 0.5, "log_every": 1})
    half = tiny_run(tmp_path / "b", Tiny(lr=0.05, steps=3))
    assert [record["lr"] for record in frozen[0] if "lr" in record] == [0.05] * 3 + [0.0] * 4
    assert all(torch.equal(frozen[1][name], half[1][name]) for name in half[1])


def test_gradients_are_clipped_to_the_norm_of_all_together():
    model = nn.Linear(3, 5)
    engine = Engine(model, EngineOptions())
    for largest, after in ((None, 13.0), (20.0, 13.0), (2.0, 2.0)):
        for parameter, size in zip(model.parameters(), (5.0, 12.0), strict=True):
            parameter.grad = torch.full_like(parameter, size / parameter.numel() ** 0.5)
        assert engine.clip(largest).item() == pytest.approx(13.0)
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        assert norm == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(("total", "count"), [(11, 1), (11, 3), (13, 5), (7, 7)])
def test_the_parts_of_a_batch_are_all_of_it_in_order_and_even(total, count):
    rows = [[*range(total)][Part(index, count).rows(total)] for index in range(count)]
    assert [row for part in rows for row in part] == [*range(total)]
    assert {len(part) for part in rows} <= {total // count, -(-total // count)}


def test_a_batch_with_fewer_rows_than_parts_is_refused():
    with pytest.raises(ValueError, match=r"^batch=2 is not allowed; choose at least one row for each of 3"):
        Part(0, 3).rows(2)


def test_the_model_is_compiled_and_checkpointed_on_request(tmp_path, monkeypatch):
    compiled, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or compiler(model, backend="eager"))
    asked = []
    monkeypatch.setattr(
        nn.Sequential, "gradient_checkpointing_enable", lambda model: asked.append(model), raising=False
    )
    options = {"engine": EngineOptions(compile=True, checkpointing=True)}
    records, weights = tiny_run(tmp_path / "a", arguments=options)
    assert len(compiled) == len(asked) == 1
    assert same((records, weights), tiny_run(tmp_path / "b"))


def test_training_records_and_samples(tmp_path):
    records, _ = tiny_run(tmp_path, arguments=ELABORATE)
    evaluated = [record for record in records if "mse" in record]
    assert [record["step"] for record in evaluated] == [0, 3, 6, 7] and evaluated[-1]["mse"] < evaluated[0]["mse"]
    trained = [record for record in records if record.get("split") == "train"]
    assert [(record["step"], record["tokens"]) for record in trained] == [(2, 22), (4, 44), (6, 66)]
    assert {*trained[0]} == {"split", "line", "lr", "grad_norm", "tokens", "step"}
    lines = [*map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())]
    assert [line["step"] for line in lines] == [0, 3, 6, 7]
    assert len({line["text"] for line in lines}) == 4  # drawn anew at each evaluation
    metrics = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert all(record["tokens_per_second"] > 0 for record in metrics if "lr" in record)


def test_the_bar_shows_loss_speed_time_left_and_samples_as_they_are(monkeypatch):
    progress, console = pytest.importorskip("rich.progress"), pytest.importorskip("rich.console")
    monkeypatch.setattr(Display, "REFRESH_SECONDS", 0.0)
    out = io.StringIO()
    columns = (progress.TextColumn("{task.completed}/{task.total} {task.fields[loss]} {task.fields[rate]}"),)
    with progress.Progress(*columns, console=console.Console(file=out, width=100)) as shown:
        bar = Display(shown, 2, 7)
        bar.stepped(3, lambda: {"loss": torch.tensor(1.23456)}, "1,234 tokens/s")
        bar.recorded(3, [{"split": "validation", "loss": 1.5, "step": 3}])
        bar.say(sample_text({"prompt": "[bold]", "text": "to be\nor not"}))
    assert "3/7 loss 1.235 1,234 tokens/s" in out.getvalue()
    assert "step 3/7 | validation loss 1.5" in out.getvalue()
    assert "    prompt: [bold]\n    text: to be\n    or not\n" in out.getvalue()


def test_every_step_part_and_evaluation_draws_its_own_random_numbers(tmp_path, monkeypatch):
    seeds, seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda value: seeds.append(value) or seed(value))
    tiny_run(tmp_path, arguments=ELABORATE)
    assert len({*seeds}) == len(seeds) == 7 * 3 + 4


def test_random_numbers_depend_on_seed_and_purpose_only():
    draws = {
        key: tuple(torch.rand(3, generator=generator(*key)).tolist()) for key in [(0, "a", 1), (0, "a", 2), (1, "a", 1)]
    }
    assert len(set(draws.values())) == 3
    assert tuple(torch.rand(3, generator=generator(0, "a", 1)).tolist()) == draws[0, "a", 1]
    assert derive(0, "a", 12) != derive(0, "a1", 2)
