"""What decides a language model's numbers: its sizes, durations and recipes."""

from pathlib import Path

import pytest

from femixer.cli import main
from femixer.models import PRESETS, preset
from femixer.models.named import parameter_count
from femixer.options import parse, with_recipe
from femixer.tasks.lm import model
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.fit import Experiment
from femixer.tasks.lm.model import ModelOptions
from femixer.tasks.lm.task import Comparison, Train
from femixer.training import EngineOptions, RunOptions


def test_models_of_the_paper_have_the_parameters_of_attention():
    comparison = Comparison(Experiment(model=ModelOptions(preset="mini")))
    counts = {
        name: parameter_count(comparison.run(name).model.config(512, vocab_size=257)) for name in comparison.models
    }
    assert all(abs(count / counts["SMAttn"] - 1) < 0.02 for count in counts.values()), counts


def test_presets_are_counted_as_they_are_built(capsys, monkeypatch):
    monkeypatch.setattr(model, "PRESETS", {name: PRESETS[name] for name in ("tiny", "mini")})
    assert main(["lm", "presets", "--vocab-size", "271"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows[2:]] == ["tiny", "mini"]
    assert f"| {parameter_count(preset('tiny', vocab_size=271, mixer='attention')):,} |" in rows[2]
    assert model.count("tiny", prior="mamba") == parameter_count(preset("tiny", prior="mamba"))


def test_durations_in_tokens_are_rounded_up_to_batches():
    experiment = Experiment(batch_tokens=512, tokens=10_000, warmup_tokens=1100)
    experiment.validate()
    assert (experiment.count, experiment.warmup) == (20, 3)
    assert (Experiment().count, Experiment().warmup) == (1000, 50)
    assert Experiment(context=29).length == 29 and Experiment().length == 256


@pytest.mark.parametrize("name", ["paper-340m", "paper-1.3b"])
def test_the_recipes_are_the_papers(name):
    nothing = Train(Experiment(), DataOptions(), EngineOptions(), RunOptions(Path("out")))
    default, rest = with_recipe(nothing, ["--recipe", name, "--seed", "3"])
    command = parse(Train, rest, "lm train", default)
    experiment = command.experiment
    experiment.validate()
    command.engine.validate()
    assert (experiment.lr, experiment.weight_decay, experiment.clip) == (4e-4, 0.1, 1.0)
    assert experiment.batch_tokens == 2**19 and experiment.warmup_tokens == 1e9 and experiment.length == 4096
    assert experiment.tokens == command.data.max_tokens == {"paper-340m": 15e9, "paper-1.3b": 100e9}[name]
    assert f"paper-{experiment.model.preset}" == name and experiment.seed == 3
    assert command.data.tokenizer == "meta-llama/Llama-2-7b-hf"
    assert command.data.data == ("datasets:HuggingFaceFW/fineweb-edu:sample-100BT",)
    assert experiment.model.config(experiment.length).vocab_size == 32000
    processes = {"paper-340m": 8, "paper-1.3b": 32}[name]
    assert experiment.sequences(processes, command.engine.accumulate) == 128
    assert experiment.warmup == 1908 and experiment.count == {"paper-340m": 28611, "paper-1.3b": 190735}[name]
