"""What commands say of results that are not what one may think, and how they take a model's folder."""

import itertools
import json

import pytest
from lm_text import texts
from transformers import LlamaConfig, LlamaForCausalLM

from femixer.cli import main
from femixer.options import model_first, model_named
from femixer.training.loop import untrained_note


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


def test_what_is_no_text_and_rates_beyond_float32_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(texts(97)))
    (tmp_path / "picture.bin").write_bytes(b"PIC\0" * 1000)
    sizes = "--preset tiny --context 16 --batch-tokens 64 --validation-tokens 64 --steps 1 --sample-tokens 0"
    assert main(["lm", "train", "--data", "picture.bin", *sizes.split(), "--out", "run"]) == 2
    assert "data='picture.bin' is not allowed; choose text in UTF-8: byte 3 of this file is" in capsys.readouterr().err
    assert main(["lm", "train", "--data", "text.txt", *sizes.split(), "--lr", "1e300", "--out", "run"]) == 2
    assert "learning_rate=1e+300 is not allowed; choose a float32 number above 0" in capsys.readouterr().err
    assert main(["lm", "data", "--data", "text.txt", "--shards", "text.txt"]) == 2
    assert "shards='text.txt' is not allowed; choose a folder" in capsys.readouterr().err


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
