"""What a command says when something is not as it should be, and small things that a reader sees."""

import json
from pathlib import Path

import pytest
import torch
from surgery_models import build

from femixer import FreeEnergyMixer
from femixer.cli import main
from femixer.damage import Damaged, check_fields, read_json
from femixer.models import files
from femixer.models.files import saved_tokenizer
from femixer.options import read_recipe
from femixer.reporting.figures import label
from femixer.surgery import upgrade
from femixer.tasks.forecast.predict import as_csv
from femixer.tasks.lm.data.tokenizer import load_tokenizer
from femixer.training.jobs import counted


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


def test_no_tokenizer_and_half_of_one_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upgrade(build("gpt2", vocab_size=257)).save_pretrained(tmp_path)
    assert "has no tokenizer" in refused(capsys, "generate", tmp_path, "--prompt", "some")
    load_tokenizer("bytes").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(capsys, "generate", tmp_path, "--prompt", "some")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert str(tmp_path) in refused(capsys, "generate", tmp_path, "--prompt", "some")


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
        assert "the hub does not answer" in refused(capsys, *data)
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


def test_a_table_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model": "tiny", "limit": None}
    (tmp_path / "results.json").write_text(json.dumps({"parameters": 7, "settings": settings, "tasks": {}}))
    told = refused(capsys, "lm", "table", tmp_path, "--out", tmp_path / "table")
    assert "at least one task of the paper's table (leaderboard_mmlu_pro" in told and not (tmp_path / "table").exists()


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
