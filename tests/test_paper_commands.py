"""The commands that make the paper's tables: what `femixer paper` lists exists, and rows are the models they name."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from femixer import paper
from femixer.bench import speed
from femixer.cli import main
from femixer.models import preset
from femixer.models.named import NAMED, Rivals
from femixer.options import expanded, parse
from femixer.tasks.forecast.model import MODELS as FORECASTERS
from femixer.tasks.forecast.task import ForecastRun
from femixer.tasks.lm.fit import Experiment
from femixer.tasks.lm.task import MODELS, ROWS, Comparison, model_arguments
from femixer.tasks.mad.table import FIGURES
from femixer.tasks.mad.task import MadRun
from femixer.tasks.vision.model import ENCODERS
from femixer.tasks.vision.task import VisionRun


def test_paper_lists_every_table_and_figure_of_the_paper(capsys):
    labels = {entry.label for entry in paper.ENTRIES.values()}
    tables = "mem_results_iclr26 unified-leaderboard-merged-onecol ts-forecast speed-latency-throughput-k gpt2_latency"
    assert {f"tab:{name}" for name in tables.split()} | {"table:imagenet1k-tiny-small", "fig:toy-argmax"} <= labels
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in paper.ENTRIES)
    for name, entry in paper.ENTRIES.items():
        assert main(["paper", name]) == 0
        shown = capsys.readouterr().out
        assert all(command in shown for command in (*entry.commands, *entry.small)) and entry.cost in shown
        assert all(ran.file in shown for ran in paper.done(entry))


def test_nothing_counts_as_run_without_the_file_that_holds_its_numbers(tmp_path):
    held = {name for name, entry in paper.ENTRIES.items() if paper.done(entry)}
    assert {"mad", "language", "imagenet", "forecast", "nodes", "argmax"} <= held
    assert not [entry for entry in paper.ENTRIES.values() if paper.done(entry, tmp_path)]


READERS = {
    "mad run": lambda args: MadRun.parse(args, "mad run"),
    "vision run": lambda args: VisionRun.parse(args, "vision run"),
    "forecast run": lambda args: ForecastRun.parse(args, "forecast run"),
    "bench speed": speed.read,
    "lm reproduce": lambda args: main(["lm", "reproduce", *args, "--dry-run"]),
}


@pytest.mark.parametrize("command", [c for entry in paper.ENTRIES.values() for c in (*entry.commands, *entry.small)])
def test_every_command_that_is_listed_can_be_read(command):
    _, *words = shlex.split(command)
    for name, read in READERS.items():
        if words[: len(name.split())] == name.split():
            assert read(words[len(name.split()) :]) not in (1, 2)


def test_groups_of_models_stand_for_their_names():
    assert expanded(("a", "both", "b"), {"both": ("a", "b", "c")}) == ("a", "b", "c", "b")  # twice: an error elsewhere
    assert MadRun.parse(["--models", "paper"], "mad run").experiment.models == tuple(FIGURES)
    assert MadRun.parse(["--models", "all"], "mad run").experiment.models == tuple(NAMED)
    assert VisionRun.parse(["--models", "all"], "vision run").experiment.models == tuple(ENCODERS)
    assert len(ForecastRun.parse(["--models", "all"], "forecast run").experiment.models) == len(FORECASTERS)


def test_the_forecasting_table_is_one_command():
    run = ForecastRun.parse(["--paper", "data", "--seeds", "2"], "forecast run").experiment
    assert len(run.models) == 9 and run.data[:2] == ("data/weather", "data/solar") and len(run.data) == 6
    assert run.horizons == (96, 192, 336, 720) and run.seeds == 2
    assert ForecastRun.parse(["--paper", "data", "--models", "GLA"], "forecast run").experiment.models == ("GLA",)


def test_the_recipe_of_imagenet_serves_one_training_and_many():
    run = VisionRun.parse(["--recipe", "deit-imagenet", "--models", "paper"], "vision run").experiment
    assert run.engine.precision == "bf16" and run.training.epochs == 300 and "FEM-SM" in run.models


# Rows of the language table


@pytest.mark.parametrize(("size", "row"), [(size, row) for size, rows in ROWS.items() for row in rows])
def test_a_row_that_is_reproduced_or_compared_is_the_model_of_that_name(size, row):
    wanted = preset("tiny", **NAMED[row])
    model = parse(Experiment, model_arguments(row), "lm train").model
    for config in (model.config(256), Comparison(models=(row,)).run(row).model.config(256)):
        for field in ("mixer", "mixer_options", "prior_options"):
            assert (getattr(config, field) or None) == (getattr(wanted, field) or None), field
        if wanted.mixer == "fem":
            assert (config.prior, config.parts) == (wanted.prior, wanted.parts)


def test_a_reproduction_is_three_commands_and_the_table_has_the_rows_before(tmp_path, capsys):
    done = tmp_path / "1.3b-eval" / "SMAttn"
    done.mkdir(parents=True)
    (done / "results.json").write_text("{}")
    given = ["lm", "reproduce", "FEM-GLA", "--out", str(tmp_path), "--dry-run", "--", "--accumulate", "8"]
    assert main(given) == 0
    train, evaluate, table = map(shlex.split, capsys.readouterr().out.splitlines())
    assert train[:5] == ["femixer", "lm", "train", "--recipe", "paper-340m"] and "--resume" not in train
    assert "--accumulate" in train and evaluate[2] == train[train.index("--out") + 1]
    assert table[3].endswith(f"/FEM-GLA={tmp_path / '340m-eval' / 'FEM-GLA'}") and table[4].endswith(f"/SMAttn={done}")
    (tmp_path / "340m" / "FEM-GLA").mkdir(parents=True)
    (tmp_path / "340m" / "FEM-GLA" / "config.json").write_text("{}")
    assert main(given) == 0
    train, evaluate, _ = map(shlex.split, capsys.readouterr().out.splitlines())
    assert train[-1] == "--resume" and "--resume" not in evaluate  # only where there is something to go on from
    assert main(["lm", "reproduce", "HGRN"]) == 2
    assert "row='HGRN' is not allowed; choose one of DiffTrans, " in capsys.readouterr().err


# Options of rivals


def test_options_of_rivals_reach_those_that_take_them():
    for given in (("slots=64", "heads=2"), ('{"slots": 64, "heads": 2}',)):
        options = Rivals(given)
        assert options.fields(NAMED["GSA"]) == {"mixer_options": {"gsa": {"slots": 64, "heads": 2}}}
        assert options.fields(NAMED["DeltaNet"]) == {"mixer_options": {"deltanet": {"heads": 2}}}  # instead of its own
        assert options.fields(NAMED["FEM-SM"]) == {}
        options.validate(NAMED["FEM-SM"], NAMED["GSA"])
        with pytest.raises(
            ValueError, match=r"mixer_options='slots' is not allowed; choose options of .*deltanet: heads"
        ):
            options.validate(NAMED["DeltaNet"], NAMED["FEM-SM"])
    assert Rivals().fields(NAMED["DeltaNet"]) == {"mixer_options": {"deltanet": {"heads": 4}}}
    for wrong in ("slots", "=3", "{slots: 64}"):
        with pytest.raises(ValueError, match=r"mixer_options=.* is not allowed; choose option=value"):
            Rivals((wrong,)).validate(NAMED["GSA"])


def test_options_of_rivals_are_on_the_command_line_of_every_task():
    given = ["--models", "GSA", "FEM-SM", "--mixer-options", "slots=7"]
    jobs = MadRun.parse([*given, "--tasks", "recall"], "mad run").jobs()
    assert {job.model: job.fields.get("mixer_options") for job in jobs} == {
        "GSA": {"gsa": {"slots": 7}},
        "FEM-SM": None,
    }
    plain = MadRun.parse(["--models", "DeltaNet", "--tasks", "recall"], "mad run").jobs()
    assert plain[0].fields["mixer_options"] == NAMED["DeltaNet"]["mixer_options"]
    run = ForecastRun.parse(given, "forecast run").experiment
    assert run.sizes.rivals.fields(FORECASTERS["GSA"]) == {"mixer_options": {"gsa": {"slots": 7}}}
    assert VisionRun.parse(given, "vision run").experiment.sizes.rivals.values == {"slots": 7}
    comparison = Comparison(replace(Experiment(), model=replace(Experiment().model, rivals=Rivals(("slots=7",)))))
    config = comparison.run("GSA").model.config(256)
    assert config.mixer_options == {"gsa": {"slots": 7}} and "GSA" in MODELS
    assert comparison.run("RWKV7").model.config(256).mixer_options == {"rwkv7": {"heads": 4}}


def test_an_option_that_no_model_takes_is_an_error(tmp_path: Path, capsys):
    for task in (["mad", "run"], ["lm", "compare"], ["forecast", "run"], ["vision", "run"]):
        given = [*task, "--models", "SMAttn", "--mixer-options", "slots=7", "--out", str(tmp_path / "never")]
        assert main(given) == 2
        assert "mixer_options='slots' is not allowed" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
