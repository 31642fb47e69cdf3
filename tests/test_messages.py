"""What a command says when something is not as it should be or not what one may think, how commands take a model's
folder, and small things that a reader sees."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from lm_text import texts
from surgery_models import build
from transformers import LlamaConfig, LlamaForCausalLM

from femixer import FreeEnergyMixer
from femixer.cli import main
from femixer.damage import Damaged, check_fields, read_json
from femixer.models import files
from femixer.models.files import saved_tokenizer
from femixer.options import model_first, model_named, read_recipe
from femixer.reporting.figures import label
from femixer.surgery import upgrade
from femixer.tasks.forecast.predict import as_csv
from femixer.tasks.lm.data.tokenizer import load_tokenizer
from femixer.training.jobs import counted
from femixer.training.loop import untrained_note


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main([str(arg) for arg in args]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 of 71 positions, upgraded, with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("upgraded")
    upgrade(build("gpt2", vocab_size=257)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


def test_no_text_beyond_the_positions_of_a_model(upgraded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "generate", upgraded, "--prompt", "some", "--max-tokens", 68)
    assert "max_tokens=68 is not allowed" in told and "71 positions" in told
    assert main(["generate", str(upgraded), "--prompt", "some", "--max-tokens", "67", "--ignore-end"]) == 0
    assert "71 positions" in refused(capsys, "inspect", upgraded, "--text", "x" * 80, "--out", upgraded / "out")


def test_a_model_that_is_not_causal_continues_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upgrade(build("bert", vocab_size=257)).save_pretrained(tmp_path)
    load_tokenizer("bytes").save_pretrained(tmp_path)
    told = refused(capsys, "generate", tmp_path, "--prompt", "some")
    assert "FEMBertForMaskedLM, which does not continue a text" in told


def test_a_name_is_not_looked_for_at_length_without_a_network(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    asked = []

    class Nobody:
        def head(self, address: str, timeout: float) -> None:
            asked.append(address)
            raise OSError("no network")

    monkeypatch.setattr(files.hub_utils, "get_session", Nobody)
    monkeypatch.setattr(files.constants, "HF_HUB_OFFLINE", False)
    files.is_offline.cache_clear()
    try:
        told = refused(capsys, "upgrade", "nobody/nothing", "--out", tmp_path / "out")
        assert "the hub does not answer" in told
        data = ["lm", "data", "--data", Path(__file__), "--shards", tmp_path / "data", "--tokenizer", "nobody/nothing"]
        told = refused(capsys, *data)
        assert "tokenizer='nobody/nothing' is unknown (there is no folder 'nobody/nothing', and" in told
        assert "the hub does not answer" in told
        with pytest.raises((OSError, ValueError), match="nobody/nothing"):
            saved_tokenizer("nobody/nothing")
        assert len(asked) == 1
    finally:
        files.is_offline.cache_clear()


def test_a_recipe_is_not_shown_at_length_and_has_each_name_once(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    for text, message in (
        ("lr: [1\n" + "steps: 3\n" * 500, r"own.yaml: not YAML \(.*, line 2, column"),
        ("steps: 2\nlr: 0.1\nsteps: 3\n", "own.yaml: steps is there twice, in lines 1 and 3"),
        ("batch-tokens: 2\nbatch_tokens: 3\n", "own.yaml: batch_tokens is there twice, in lines 1 and 2"),
        ("x" * 5000, "own.yaml: expected `option: value`"),
        ("a: \x01", "own.yaml: not YAML"),
    ):
        file.write_text(text)
        with pytest.raises(Damaged, match=message) as error:
            read_recipe(file)
        assert len(str(error.value)) < 300 + len(str(file)) and "\n" not in str(error.value)


def test_json_has_each_name_once_and_fields_of_the_right_kind(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text('{"a": 1, "b": {"c": 1, "c": 2}}')
    with pytest.raises(Damaged, match=r"some.json: 'c' is there twice"):
        read_json(file)
    fields = {"a": int, "b?": [{"c": (float, None)}]}
    assert check_fields({"a": 1, "b": [{"c": None}, {"c": 2}]}, fields, file) and check_fields({"a": 1}, fields, file)
    for content, message in (
        ({"a": True}, "a=True is not allowed; expected a whole number"),
        ({"a": 10**30}, "a=1000"),
        ({}, "a is missing"),
        ([], r"\[\] is not allowed; expected an object"),
        ({"a": 1, "b": [{"c": float("nan")}]}, r"b\[0\].c=nan is not allowed; expected a finite number or null"),
        ({"a": 1, "b": {}}, "b={} is not allowed; expected a list"),
    ):
        with pytest.raises(Damaged, match=f"some.json: {message}"):
            check_fields(content, fields, file)


def test_there_must_be_something_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "argmax", "--steps", 1, "--resume", "--out", tmp_path / "tpyo")
    assert "resume=True" in told and "tpyo' holds none" in told and not (tmp_path / "tpyo").exists()


def test_options_that_no_machine_counts_to_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "lr=nan is not allowed; choose a finite number" in refused(capsys, "argmax", "--lr", "nan")
    assert "steps=1000" in refused(capsys, "argmax", "--steps", 10**30)


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    def broken(args: object) -> None:
        raise KeyError("nobody")

    monkeypatch.setattr("femixer.tasks.argmax.main", broken)
    told = refused(capsys, "argmax")
    assert told.startswith("error: KeyError: 'nobody' (unexpected")
    file = Path(told.rpartition(" ")[2].removesuffix(")"))
    assert "in broken" in file.read_text()
    file.unlink()


def test_small_things() -> None:
    pandas = pytest.importorskip("pandas")
    assert [counted(jobs) for jobs in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    frame = pandas.DataFrame({"=cmd()": [1.0], "@x": [-2.0], "a": [3.0]})
    assert as_csv(frame, "+date").splitlines() == ["'+date,'=cmd(),'@x,a", "0,1.0,-2.0,3.0"]
    assert label("a\tb\n$c") == "a b $c" and len(label("x" * 99)) == 24 and label("") == " "
    mixer = FreeEnergyMixer(12, heads=3)
    x = torch.randn(2, 5, 12)
    assert repr(mixer.inspect(x)) == "Inspection(batch=2, heads=3, tokens=5, channels=2, dtype=torch.float32)"
    with pytest.raises(ValueError, match=r"x of shape \(2, 0, 12\) has no token to inspect"):
        mixer.inspect(x[:, :0])


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"2020-01-01 {minute // 60:02d}:{minute % 60:02d},{minute % 7}\n" for minute in range(400)]
    (tmp_path / "rows.csv").write_text("date,a\n" + "".join(lines))
    return tmp_path / "rows.csv"


def test_untrained_weights_that_are_kept_are_said_to_be(rows, capsys):
    sizes = "--lookback 12 --horizon 3 --width 8 --layers 1 --heads 1 --epochs 1 --batch 128"
    assert main(["forecast", "train", "--data", "rows.csv", *sizes.split(), "--lr", "1e-30", "--out", "run"]) == 0
    assert "No evaluation was better than that of the untrained weights" in capsys.readouterr().out
    # Of what was trained, of what cannot be, and of what diverged (which is an error) nothing is said.
    for best, steps, diverged in ((3, 7, None), (0, 0, None), (0, 7, "the loss is nan")):
        assert untrained_note({"best_step": best, "steps": steps, "diverged": diverged}) == []


def test_samples_end_where_the_context_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(texts(97)))
    sizes = "--preset tiny --context 16 --batch-tokens 64 --validation-tokens 64 --steps 1"
    train = ["lm", "train", "--data", "text.txt", *sizes.split(), "--out", "run"]
    assert main([*train, "--prompt", "fifteen letters"]) == 2
    assert "prompt='fifteen letters' is not allowed; choose a text of fewer than 15 tokens" in capsys.readouterr().err
    assert main([*train, "--prompt", "the", "--sample-tokens", "128"]) == 0
    shown = [json.loads(line)["text"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert shown and all(len(text) <= 16 - 4 for text in shown)


@pytest.mark.parametrize(("name", "value"), [("eos_token_id", 71), ("bos_token_id", -1)])
def test_an_upgrade_refuses_ends_of_text_that_are_no_tokens(tmp_path, capsys, name, value):
    sizes = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 28}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).save_pretrained(tmp_path / "llama")
    for file in ("config.json", "generation_config.json"):
        path = tmp_path / "llama" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert main(["upgrade", str(tmp_path / "llama"), "--out", str(tmp_path / "fem")]) == 2
    error = capsys.readouterr().err
    assert f"config.json: {name}={value} is not allowed; choose a token below 61, or null" in error
    assert not (tmp_path / "fem").exists()


@pytest.mark.parametrize(
    ("config", "table", "told"),
    [
        ({"task": "forecast", "experiment": {}}, False, "is an unfinished run of 'forecast' without a record.json"),
        ({"task": "lm", "experiment": {}}, True, "is a run of 'lm' without a record.json"),
        ({"model_type": "fem"}, False, "is a folder with a model, and not its results"),
        (None, False, "is a folder without results"),
    ],
)
@pytest.mark.parametrize("task", ["forecast", "vision"])
def test_a_table_of_something_else_says_what_it_is(tmp_path, capsys, task, config, table, told):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if table:
        (tmp_path / "table.md").write_text("| done |\n")
    assert main([task, "table", "--results", str(tmp_path), "--out", str(tmp_path / "table")]) == 2
    error = capsys.readouterr().err
    assert f"results={str(tmp_path)!r} {told}; choose a store of `femixer {task} run`, a finished run" in error


def test_a_model_may_be_the_first_argument_or_an_option_of_every_command():
    for args in (["run", "--a", "1"], ["--model", "run", "--a", "1"], ["--a", "1", "--model=run"]):
        assert model_first(args) == ["run", "--a", "1"]
    assert model_first(["--help"]) == ["--help"] and model_first(["run", "--model"]) == ["run", "--model"]
    assert (
        model_named(["run", "--a", "1"])
        == ["--model", "run", "--a", "1"]
        == model_named(["--model", "run", "--a", "1"])
    )
    assert model_named([]) == []
    for read, args in itertools.product((model_first, model_named), (["--model", "b"], ["--model=b"])):
        with pytest.raises(ValueError, match=r"model='b' is not allowed; choose it or the first arg.* 'a', not both"):
            read(["a", "--x", "1", *args])
        with pytest.raises(ValueError, match=r"model='b and c' is not allowed; choose one$"):
            read([*args, "--model", "c"])
