"""`femixer lm train` and `compare`: what they learn, what they leave, and what stops them."""

import errno
import json
import math
import os
import random
import statistics
from collections import Counter, defaultdict

import pytest
import safetensors.torch
import torch
from started import torchrun
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from femixer.cli import main
from femixer.models import PRESETS, FEMForCausalLM
from femixer.tasks.lm.data.building import prepare
from femixer.tasks.lm.data.corpus import open_corpus
from femixer.tasks.lm.data.shards import Batches
from femixer.tasks.lm.data.tokenizer import load_tokenizer, train_bpe
from femixer.tasks.lm.fit import documents, summed_loss
from femixer.tasks.lm.model import ModelOptions, build
from femixer.tasks.lm.task import LmRun
from femixer.training import RunOptions

WORDS = ("violet ", "quartz ", "jumbled ", "phobic ", "skewing\n")
SMALL = ("--hidden-size", 12, "--layers", 1, "--heads", 2, "--context", 23, "--batch-tokens", 92, "--threads", 1)
SHORT = (*SMALL, "--steps", 6, "--evaluate-every", 3, "--sample-tokens", 5, "--validation-tokens", "None")
TIMES = ("seconds", "tokens_per_second")


def words(seed, count):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where all tests run, so that a text is tokenized once."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "text.txt").write_text(words(0, 600))
    (folder / "held.txt").write_text(words(1, 40))
    train_bpe([words(0, 600)], 263).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def lm(command, out, *options, text="text.txt"):
    return main(["lm", command, "--data", str(text), "--out", str(out), *map(str, options)])


def trained(out, *options, **named):
    assert lm("train", out, *SHORT, *options, **named) == 0
    return outcome(out)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(records):
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def outcome(out):
    """All of a run that does not depend on the clock."""
    records = timeless(lines(out / "metrics.jsonl")), lines(out / "samples.jsonl")
    return *records, (out / "model/model.safetensors").read_bytes()


def losses(result, split="train"):
    return [record["loss"] for record in result[0] if record["split"] == split]


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """The outcome of a run of 61 steps that nobody stops."""
    before = os.getcwd()
    os.chdir(place)
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert lm("train", out, *LONG) == 0
    os.chdir(before)
    return outcome(out)


LONG = (*SMALL, "--steps", 61, "--evaluate-every", 13, "--sample-tokens", 3, "--dropout", 0.1)


# --- one run


def test_a_run_learns_and_leaves_a_model_with_the_recorded_loss(tmp_path):
    out = tmp_path / "run"
    options = ("--tokenizer", "tokenizer", "--validation", "held.txt", "--prompt", "jumb", "--lr", 0.02)
    options += ("--steps", 90, "--evaluate-every", 45, "--sample-tokens", 31, "--validation-tokens", "None")
    assert lm("train", out, *SMALL, *options) == 0

    held = words(1, 40)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(held, add_special_tokens=False).input_ids])
    nats = sum(
        functional.cross_entropy(model(part[None, :-1]).logits[0], part[1:], reduction="sum").item()
        for part in (ids[start : start + 24] for start in range(0, len(ids) - 1, 23))
    )
    records = lines(out / "metrics.jsonl")
    validation = [record for record in records if record["split"] == "validation"]
    assert [record["step"] for record in validation] == [0, 45, 90]
    final = validation[-1]
    assert final["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
    assert final["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(held.encode()), rel=1e-5)
    counts = Counter(ids[1:].tolist())
    unigram = -sum(n * math.log(n / counts.total()) for n in counts.values()) / counts.total()
    assert final["loss"] < 0.5 * unigram < validation[0]["loss"]

    training = [record for record in records if record["split"] == "train"]
    assert [record["step"] for record in training] == [*range(10, 91, 10)]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= {*training[0]}
    assert training[-1]["tokens"] == 90 * 92 and training[-1]["lr"] == pytest.approx(0.02 * 0.1)
    samples = lines(out / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 45, 90] and samples[-1]["prompt"] == "jumb"
    assert samples[-1]["text"] != samples[0]["text"]
    config = json.loads((out / "config.json").read_text())
    assert config["experiment"]["lr"] == 0.02 and config["experiment"]["vocabulary"] == len(tokenizer)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "table.md").read_text()
    assert f"| {model.num_parameters():,} | {final['loss']:.4f} |" in table
    assert table.startswith(f"Language model tiny (hidden_size {model.config.hidden_size}, layers ")  # not the preset's

    pair = tokenizer(["violet qu", "phobic jumbled skew"], padding=True, padding_side="left", return_tensors="pt")
    written = model.generate(**pair, max_new_tokens=5, do_sample=False)  # no warning about a missing pad token
    assert written.shape == (2, pair.input_ids.shape[1] + 5)


def test_the_engine_changes_nothing_but_rounding(tmp_path):
    plain = losses(trained(tmp_path / "plain"))
    assert losses(trained(tmp_path / "pieces", "--accumulate", 2)) == pytest.approx(plain, rel=1e-5)
    assert losses(trained(tmp_path / "again", "--checkpointing")) == pytest.approx(plain, rel=1e-5)
    low = losses(trained(tmp_path / "bf16", "--precision", "bf16"))
    assert low == pytest.approx(plain, rel=0.02) and low != plain


# --- packed documents


@pytest.mark.parametrize("options", [{}, {"prior": ("gla", "softmax")}, {"mixer": ("attention",)}])
def test_no_loss_crosses_documents(tmp_path, options):
    texts = ["violet quartz", "skewing phobic q", "jumbled"]

    def packed(name, texts):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        shards = prepare(open_corpus([path], ["held.txt"]), load_tokenizer(), tmp_path / name)
        return Batches(shards, context=38, batch=1)(0)

    model = build(ModelOptions(hidden_size=12, layers=2, heads=2, **options).config(38, vocab_size=257), seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)  # far from the flat predictions of the start

        def token_losses(batch):
            logits = model(batch.inputs, segments=documents(batch.segments)).logits
            return functional.cross_entropy(logits[0], batch.targets[0], reduction="none")

        batch = packed("one", texts)
        found = token_losses(batch)
        ids = [[256, *text.encode()] for text in texts]
        expected = []
        for document, following in zip(ids, [*ids[1:], []], strict=True):
            targets = torch.tensor([*document[1:], *following[:1]])
            logits = model(torch.tensor([document])).logits[0, : len(targets)]
            expected.append(functional.cross_entropy(logits, targets, reduction="none"))
        torch.testing.assert_close(found, torch.cat(expected)[:38])
        assert summed_loss(model, batch).item() == pytest.approx(found.sum().item(), rel=1e-5)

        other = token_losses(packed("other", [texts[0], "q cibohp gniweks", texts[2]]))
        same = torch.isclose(other, found)
        assert same[:14].all() and same[31:].all() and not same[14:30].any()


# --- several models


def without_speed(table):
    """The rows up to their last column."""
    return [line.rpartition("|")[0].rpartition("|")[0] for line in table.splitlines()]


def test_compared_models_see_the_same_batches_and_share_a_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "three"
    options = (*SMALL, "--steps", 3, "--evaluate-every", 2, "--seeds", 2, "--seed", 5, "--models", "SMAttn")
    options += ("FEM-GLA", "custom", "--prior", "gla:decay=channel", "softmax", "--parts", "CL")
    assert lm("compare", out, *options, "--jobs", 2) == 0
    assert "6/6 jobs" in capsys.readouterr().err
    table = (out / "table.md").read_text()
    best = {}
    for name in ("SMAttn", "FEM-GLA", "custom"):
        each = [lines(out / "runs" / f"{name}-seed-{seed}" / "metrics.jsonl") for seed in (5, 6)]
        a, b = ([record for record in run if record["split"] == "validation"][-1]["loss"] for run in each)
        best[name] = (a + b) / 2
        assert f"{(a + b) / 2:.4f}" in table and f" ± {abs(a - b) / math.sqrt(2):.4f} |" in table
        model = FEMForCausalLM.from_pretrained(out / "runs" / f"{name}-seed-5" / "model")
        assert f" | {model.num_parameters():,} | " in table
        assert "femixer lm compare --data text.txt" in (out / f"runs/{name}-seed-5/model/README.md").read_text()
    winner = min(best, key=best.get)
    assert table.count("**") == 2 and f"| {winner} | **{best[winner]:.4f}**" in table
    assert statistics.fmean(best.values()) < math.log(257)
    assert not [*out.glob("runs/*/checkpoints")] and (out / "figure.png").exists()

    kept = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*") if "custom-seed-6" not in str(path)}
    before = lines(out / "runs/custom-seed-6/metrics.jsonl")
    next(out.glob("jobs/custom-seed-6-*")).unlink()
    (out / "table.md").unlink()
    assert lm("compare", out, *options, "--resume") == 0
    assert "6 jobs, 5 of them finished before" in capsys.readouterr().err
    assert timeless(lines(out / "runs/custom-seed-6/metrics.jsonl")) == timeless(before)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert without_speed((out / "table.md").read_text()) == without_speed(table)

    batches, call = defaultdict(list), Batches.__call__
    jobs = LmRun.parse(["--data", "text.txt", "--out", str(out), *map(str, options)], "lm compare").jobs()
    for job in jobs:

        def batch(self, step, *part, job=job):
            given = call(self, step, *part)
            batches[job].append((step, given.inputs.tolist()))
            return given

        monkeypatch.setattr(Batches, "__call__", batch)
        record = job.carry_out(RunOptions(tmp_path / "here" / job.place, threads=1, device="cpu"))
        assert record["loss"] == json.loads((out / "jobs" / f"{job.name}.json").read_text())["loss"]
    by_seed = {seed: [batches[job] for job in jobs if job.spec.experiment.seed == seed] for seed in (5, 6)}
    assert all(len(each) == 3 and each[0] == each[1] == each[2] and len(each[0]) == 3 for each in by_seed.values())
    assert by_seed[5] != by_seed[6]


def test_a_comparison_has_one_run_of_a_model_and_seed(tmp_path, capsys):
    out = tmp_path / "one"
    options = (*SMALL, "--steps", 1, "--seeds", 2, "--models", "SMAttn", "--validation-tokens", 23)
    assert lm("compare", out, *options, "--resume") == 2
    assert "resume=True is not allowed; choose a comparison to continue" in capsys.readouterr().err
    assert lm("compare", out, *options, "--part", "1/2", "--dry-run") == 0
    assert capsys.readouterr().out == "2 jobs, 1 in part 1/2, 0 of them finished\n" and not out.exists()
    assert lm("compare", out, *options, "--part", "1/2") == 0
    (first,) = out.glob("runs/*")
    assert not (out / "table.md").exists()  # which would be of a part only
    number = first.stat().st_ino
    capsys.readouterr()
    for other in (("--lr", 0.1), ("--lr", 0.1, "--overwrite"), ("--precision", "bf16")):
        assert lm("compare", out, *options, *other) == 2
        assert "choose another folder: here SMAttn seed" in capsys.readouterr().err
    assert lm("compare", out, *options, "--overwrite") == 0
    assert "2/2 jobs" in capsys.readouterr().err and first.stat().st_ino != number and (out / "table.md").exists()


def test_processes_of_torchrun_share_the_runs_of_a_comparison(tmp_path):
    options = ["--data", "text.txt", *SMALL, "--steps", 2, "--seeds", 1, "--models", "SMAttn", "GLA"]
    options += ["--validation-tokens", 46]
    two = torchrun(2, "-m", "femixer", "lm", "compare", "--out", tmp_path / "two", "--device", "cpu", *options)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("| SMAttn |") == 1 and two.stderr.count("2/2 jobs") == 1
    assert not [*(tmp_path / "two/running").iterdir()] and not (tmp_path / "two/errors").exists()
    job = LmRun.parse([*map(str, options)], "lm compare").jobs()[0]
    alone = job.carry_out(RunOptions(tmp_path / "one", threads=1, device="cpu"))
    record = json.loads((tmp_path / "two/jobs" / f"{job.name}.json").read_text())
    assert record["loss"] == pytest.approx(alone["loss"], rel=1e-4)


# --- options


def test_options_reach_the_model(tmp_path):
    options = "--prior gla:decay=channel softmax --mixer fem --layers 3 --kv-heads 1 --window 7 --parts LT"
    trained(tmp_path / "run", *options.split(), "--tie-embeddings", "--dropout", 0.1)
    config = FEMForCausalLM.from_pretrained(tmp_path / "run/model").config
    assert (config.mixer, config.prior, config.parts) == ("fem", ["gla", "softmax"], "LT")
    assert config.prior_options == {"gla": {"decay": "channel"}}
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 2, 1)
    assert (config.window, config.mixer_dropout, config.tie_word_embeddings) == (7, 0.1, True)
    assert (config.hidden_size, config.max_position_embeddings, config.vocab_size) == (12, 23, 257)
    attention = ModelOptions(mixer=("attention",)).config(23)
    assert (attention.mixer, attention.num_hidden_layers) == ("attention", PRESETS["tiny"]["num_hidden_layers"])


# --- what stops a run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data", "nowhere.txt"], "data='nowhere.txt' is not there; choose a file"),
        (["--data", "empty.txt"], "data='empty.txt' is not allowed; choose a file that is not empty"),
        (["--data", "picture.bin"], "data='picture.bin' is not allowed; choose text in UTF-8: byte 3 of this file is"),
        (["--context", 9000, "--batch-tokens", 9000], "too few for one window of context=9000"),
        (["--preset", "huge"], "preset='huge' is not allowed; choose one of tiny, mini"),
        (["--tokenizer", "./nowhere"], "tokenizer='./nowhere' is unknown"),
        (["--recipe", "nowhere"], "recipe='nowhere' is not allowed; choose a YAML file, or one of "),
        (["--recipe", "bad.yaml"], "bad.yaml: learning_rate is unknown; choose from accumulate"),
        (["--batch-tokens", 100], "batch_tokens=100 is not allowed; choose a multiple of 23 (context 23 x processes 1"),
        (
            ["--accumulate", 3],
            "batch_tokens=92 is not allowed; choose a multiple of 69 (context 23 x processes 1 x acc",
        ),
        (["--warmup-steps", 7], "warmup_steps=7 is not allowed; choose at most the run's 6 steps of 92 tokens"),
        (["--warmup-tokens", 900], "warmup_tokens=900 is not allowed; choose at most the run's 6 steps of 92 tokens"),
        (["--tokens", 1000], "steps=6 is not allowed; choose either steps or tokens (1000), and None for the other"),
        (["--lr", 1e300], "lr=1e+300 is not allowed; choose a number above 0 that float32 holds"),
        (["--context", 1], "context=1 is not allowed; choose at least 2, or no samples (sample_tokens 0)"),
        (["--min-lr-fraction", 2], "min_lr_fraction=2.0 is not allowed; choose a number from 0 to 1"),
        (["--dropout", 1], "dropout=1.0 is not allowed"),
        (["--beta2", 1], "beta2=1.0 is not allowed"),
        (["--heads", 5], "heads=5"),
        (["--mixer", "fam"], "mixer='fam' is unknown; choose one of fem, attention"),
        (["--prior", "sofmax"], "prior='sofmax' is not allowed; choose one of softmax"),
        (["--prior", "gla", "gla:decay=channel"], "choose the same options wherever one occurs"),
        (["--prior", "gla:decay=sometimes"], "decay='sometimes'"),
        (["--parts", "X"], "parts='X'"),
        (["--mixer", "attention", "--window", 5], "window=5 does not fit mixer='attention'"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_allowed(place, tmp_path, options, told, capsys):
    (place / "empty.txt").touch()
    (place / "picture.bin").write_bytes(b"PIC\0" * 1000)
    (place / "bad.yaml").write_text("learning_rate: 1\n")
    assert lm("train", tmp_path / "run", *SHORT, *options) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and told in error
    assert all(" parts tokenized, " in line for line in before)  # once, where no test has needed the text yet
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--models", "SMAttn", "FEM"], "models='FEM' is not allowed; choose different ones of SMAttn"),
        (["--models", "SMAttn", "SMAttn"], "choose different ones of"),
        (["--models"], "choose different ones of"),
        (["--prior", "gla"], "prior=('gla',) is not allowed; choose --models ... custom too"),
        (["--seeds", 0], "seeds=0"),
        (["--jobs", 0], "jobs=0"),
    ],
)
def test_a_comparison_says_what_is_allowed(tmp_path, options, told, capsys):
    assert lm("compare", tmp_path / "run", *SMALL, *options) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tokens_that_are_not_there_are_never_another_text(tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for folder in (tmp_path / "TYPO", unfinished):
        for command in (["train", "--out", str(tmp_path / "run")], ["compare", "--out", str(tmp_path / "runs")]):
            assert main(["lm", *command, "--shards", str(folder), "--steps", "1"]) == 2
            told = capsys.readouterr().err.splitlines()
            assert len(told) == 1 and f"shards={str(folder)!r} cannot be read: it is no folder of tokens" in told[0]
    assert not (tmp_path / "TYPO").exists() and not (tmp_path / "run").exists()


def test_a_run_is_resumed_as_it_was_only(tmp_path, capsys):
    out, text = tmp_path / "run", tmp_path / "own.txt"
    text.write_text(words(0, 80))
    trained(out, text=text)

    def told(*options):
        capsys.readouterr()
        assert lm("train", out, *SHORT, *options, text=text) == 2
        return capsys.readouterr().err

    assert "lr was 0.002 and is now 0.1" in told("--resume", "--lr", 0.1)
    assert "vocabulary was 257 and is now 263" in told("--resume", "--tokenizer", "tokenizer")
    text.write_text(words(1, 80))
    assert "text was" in told("--resume")


def test_a_full_disk_or_a_damaged_checkpoint_loses_only_what_came_after(tmp_path, undisturbed, monkeypatch, capsys):
    out = tmp_path / "run"
    write, saved = safetensors.torch.save_file, []

    def no_room(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(tensors, path, *rest, **options):
        saved.append(path)
        if len(saved) == 6:  # weights and optimizer of the third checkpoint
            path.write_bytes(b"the first part of the fi")
            no_room()
        return write(tensors, path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        assert lm("train", out, *LONG) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step-00000039 could not be saved" in error and "No space left" in error and "intact" in error
    assert sorted(os.listdir(out / "checkpoints")) == ["step-00000013", "step-00000026"]

    with monkeypatch.context() as patch:
        patch.setattr(FEMForCausalLM, "save_pretrained", no_room)
        assert lm("train", out, *LONG, "--resume") == 2
    assert "model could not be saved ([Errno 28] No space left" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(os.listdir(out / "checkpoints")) == ["step-00000052", "step-00000061"]

    newest = out / "checkpoints/step-00000061/weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-7] ^= 1
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="step-00000061 is damaged .* going back"):
        assert lm("train", out, *LONG, "--resume") == 0
    assert outcome(out) == undisturbed
