"""`femixer mad table` on made-up results: the rule of selection by hand, what is missing, and the files."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

from femixer.cli import main
from femixer.reporting import as_csv, as_latex, as_markdown
from femixer.tasks.mad import TASK, TASKS
from femixer.tasks.mad.table import FIGURES, GROUPS, rows, sizes, tabulate, with_average
from femixer.training.store import export


def evaluation(step: int, validation: tuple[float, float], test: tuple[float, float]) -> dict:
    """Accuracy and loss of each split."""
    scores = {"validation": validation, "test": test}
    return {"step": step, **{name: {"accuracy": pair[0], "loss": pair[1]} for name, pair in scores.items()}}


def record(model: str = "SMAttn", task: str = "recall", accuracy: float = 0.5, **fields) -> dict:
    """A finished job; its accuracy is that of its last evaluation, which has the lowest loss."""
    return {
        "model": model,
        "task": task,
        "parameters": {**TASKS[task].defaults, **fields.pop("parameters", {})},
        "protocol": "lite",
        "seed": 0,
        "lr": 1e-3,
        "weight_decay": 0.0,
        "steps": 7,
        "seconds": 1.0,
        "parameter_count": 11,
        "evaluations": [
            evaluation(0, (0.1, 3.0), (0.1, 3.0)),
            evaluation(7, (accuracy, 1.0), (accuracy, 1.0)),
        ],
        "environment": {"femixer": "0.1.0"},
        **fields,
    }


def finished(models: tuple[str, ...], seeds: int = 1, accuracy: float = 0.5) -> list[dict]:
    return [record(model, task, accuracy, seed=seed) for seed in range(seeds) for task in TASKS for model in models]


def entries(records: list[dict], select: str = "validation", all_rows: bool = False) -> dict:
    """(model, title) -> entry; of a row that stands twice, the second."""
    table = tabulate(records, select, all_rows)
    titles = [title.replace("\n", " ") for title in table.header]
    return {(row[0], title): each for row in table.rows for title, each in zip(titles, row, strict=True)}


EARLY = evaluation(1, (0.4, 0.7), (0.91, 2.0))
MIDDLE = evaluation(2, (0.6, 0.5), (0.55, 1.0))
LATE = evaluation(3, (0.9, 0.9), (0.50, 0.8))


def test_a_job_counts_at_its_lowest_loss_on_the_selecting_split() -> None:
    records = [record(evaluations=[EARLY, MIDDLE, LATE])]
    assert rows(records)["SMAttn"]["recall"].mean == 0.55  # not at the highest validation accuracy, nor the best test
    assert rows(records, "test")["SMAttn"]["recall"].mean == 0.50


def test_the_best_learning_rate_and_weight_decay_are_those_of_the_selecting_split() -> None:
    records = [
        record(lr=1e-3, evaluations=[evaluation(1, (0.7, 1.0), (0.6, 1.0))]),
        record(lr=5e-4, evaluations=[evaluation(1, (0.6, 0.5), (0.9, 1.0))]),
        record(lr=5e-4, weight_decay=0.1, evaluations=[evaluation(1, (0.5, 0.4), (0.7, 1.0))]),
    ]
    assert rows(records)["SMAttn"]["recall"].mean == 0.6
    assert rows(records, "test")["SMAttn"]["recall"].mean == 0.9
    assert any("best of 3 learning rates and weight decays" in text for text in tabulate(records, "test").notes)


def test_a_job_that_diverged_counts_where_its_loss_was_finite() -> None:
    nan = evaluation(3, (0.0, float("nan")), (0.99, float("nan")))
    for records in ([record(evaluations=[nan, EARLY, MIDDLE])], [record(evaluations=[EARLY, MIDDLE, nan])]):
        assert rows(records)["SMAttn"]["recall"].mean == 0.55


def test_trainings_that_diverged_are_told_below_the_table() -> None:
    told = "Training diverged, in some runs, of FEM-SM; what they reached before that counts."
    diverged = record("FEM-SM", diverged="the loss is nan at step 2")
    assert told in tabulate([record(), diverged], "validation").notes
    assert not any("diverged" in note for note in tabulate([record(diverged=None)], "validation").notes)


def test_without_some_tasks_there_is_no_average_and_nothing_is_called_unfinished() -> None:
    found = entries([record(), record(task="compression")])
    assert (found["SMAttn", "Avg"].value, found["SMAttn", "Avg"].missing) == ("", "")


def test_a_task_is_the_mean_of_its_settings_and_a_model_of_its_tasks() -> None:
    """The full protocol, with accuracies that say which setting they are of."""
    records = [
        record(task=task, parameters=setting, protocol="full", accuracy=(number + 1) / 100, steps=number)
        for task in TASKS
        for number, setting in enumerate(TASKS[task].settings())
    ]
    row = rows(records)["SMAttn"]
    means = [(len(task.settings()) + 1) / 200 for task in TASKS.values()]
    assert [cell.mean for cell in row.values()] == pytest.approx(means)
    assert with_average(row)[-1].mean == pytest.approx(statistics.mean(means))
    row = rows(records[:-1])["SMAttn"]  # without one of 13 settings there is no mean, whatever the others have
    assert row["selective-copying"].mean is None and with_average(row)[-1].mean is None
    assert (row["selective-copying"].jobs, row["selective-copying"].expected) == (12, 13)


def test_mean_and_standard_error_are_over_seeds() -> None:
    records = [
        record(task=task, accuracy=value, seed=seed) for task in TASKS for seed, value in enumerate((0.2, 0.3, 0.7))
    ]
    both = entries(records)["SMAttn", "In-Ctx Recall"], entries(records)["SMAttn", "Avg"]
    error = statistics.stdev((20, 30, 70)) / 3**0.5
    for entry in both:
        assert (entry.value, entry.error, entry.missing) == ("40.0", f"{error:.1f}", "")
    assert entries(finished(("SMAttn",)))["SMAttn", "Avg"].error == ""


def test_missing_seeds_and_unfinished_jobs_are_said_and_never_best() -> None:
    records = finished(("SMAttn", "FEM-SM", "AFT"), seeds=3, accuracy=0.4)
    gone = [("FEM-SM", "recall", 2), *(("AFT", "recall", seed) for seed in range(3))]
    records = [each for each in records if (each["model"], each["task"], each["seed"]) not in gone]
    records += [record("FEM-GLA", task, 0.9) for task in TASKS]
    found = entries(records)
    assert found["SMAttn", "In-Ctx Recall"].best and not found["SMAttn", "In-Ctx Recall"].missing
    assert found["FEM-SM", "In-Ctx Recall"].missing == found["FEM-SM", "Avg"].missing == "2 of 3 seeds"
    assert found["AFT", "In-Ctx Recall"].value == found["AFT", "Avg"].value == ""
    assert found["FEM-GLA", "Compress"].value == "90.0" and found["FEM-GLA", "Compress"].missing == "1 of 3 seeds"
    assert not found["FEM-GLA", "Compress"].best and found["FEM-SM", "Compress"].best  # 40.0, as SMAttn
    lines = as_markdown(tabulate(records, "validation")).splitlines()
    assert "40.0 ± 0.0 [2 of 3 seeds] (99.9)" in next(line for line in lines if line.startswith("| FEM-SM"))
    assert "| – (63.0) |" in next(line for line in lines if line.startswith("| AFT |"))
    assert any(line.startswith("In brackets") for line in lines)


def test_a_cell_with_too_few_learning_rates_has_no_value() -> None:
    records = [*finished(("SMAttn", "FEM-SM")), record("SMAttn", "recall", 0.6, lr=5e-4)]
    found = entries(records)
    assert (found["FEM-SM", "In-Ctx Recall"].value, found["FEM-SM", "In-Ctx Recall"].missing) == ("", "1 of 2 jobs")
    assert found["SMAttn", "In-Ctx Recall"].value == "60.0" and found["FEM-SM", "Compress"].value == "50.0"
    assert "[1 of 2 jobs] (99.9)" in as_markdown(tabulate(records, "validation"))
    assert r"\makecell{\scriptsize [1 of 2 jobs]\\\scriptsize (99.9)}" in as_latex(tabulate(records, "validation"))


def members(records: list[dict]) -> dict[str, list[str]]:
    """Title -> models."""
    return {group.title: [row[0] for row in group.rows] for group in tabulate(records, "validation").groups}


def test_rows_stand_in_the_groups_of_the_paper() -> None:
    names = [*FIGURES, "RetNet", "GLA-published"]
    groups = members(finished((*reversed(names),)))
    assert [*groups] == [*GROUPS, "Not in the paper's table"]
    for title, names in GROUPS.items():
        assert groups[title] == [*names]
    assert {*groups["Not in the paper's table"]} == {"RetNet", "GLA-published"}
    assert members(finished(("FEM-SM", "AFT"))) == {"Softmax attention": ["FEM-SM"], "AFT": ["AFT"]}


def test_all_rows_are_those_of_the_registry() -> None:
    from femixer.models.named import NAMED

    assert {*FIGURES} <= {*NAMED}
    found = entries([record("FEM-SM", accuracy=0.7)], all_rows=True)
    assert {name for name, _ in found} == {*NAMED}
    assert found["Hyena", "Compress"].paper == "44.8" and found["Hyena", "Compress"].value == ""
    assert found["FEM-SM", "In-Ctx Recall"].best and not found["Hyena", "Compress"].best


def test_the_paper_s_averages_are_those_of_its_columns_but_for_one() -> None:
    off = {name for name, row in FIGURES.items() if abs(statistics.mean(row[:-1]) - row[-1]) > 0.051}
    assert off == {"FEM-GLA"} and statistics.mean(FIGURES["FEM-GLA"][:-1]) == pytest.approx(76.2)
    assert [*dict.fromkeys(name for names in GROUPS.values() for name in names)] == [*FIGURES]
    assert any("76.2" in text for text in tabulate(finished(("FEM-GLA",)), "validation").notes)


def test_what_is_bold_is_the_best_of_a_column_as_shown() -> None:
    records = [record("SMAttn", accuracy=0.50041), record("FEM-SM", accuracy=0.50039), record("AFT", accuracy=0.4)]
    found = entries(records)
    assert [found[name, "In-Ctx Recall"].best for name in ("SMAttn", "FEM-SM", "AFT")] == [True, True, False]
    text = as_markdown(tabulate(records, "validation"))
    assert text.count("**50.0**") == 2 and "| 40.0 (63.0) |" in text
    assert as_latex(tabulate(records, "validation")).count(r"\textbf{50.0}") == 2


def test_the_csv_has_a_line_per_number() -> None:
    lines = [*csv.DictReader(as_csv(tabulate(finished(("AFT", "RetNet"), seeds=2), "validation")).splitlines())]
    assert len(lines) == 2 * 7
    assert lines[1] == {
        "group": "AFT",
        "model": "AFT",
        "task": "fuzzy-recall",
        "accuracy": "50.0",
        "standard_error": "0.0",
        "missing": "",
        "paper": "9.15",
        "size": "",
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"protocol": "full"}, "mix different protocols: lite and full"),
        ({"environment": {"femixer": "0.2.0"}}, "mix different versions of femixer: 0.1.0 and 0.2.0"),
        ({"parameters": {"length": 34}}, 'mix different settings of a task (task "recall")'),
        ({"steps": 8}, "mix different ways of training a task"),
        ({"accuracy": 0.6, "model": "SMAttn"}, "mix different results of one job"),
        (
            {"model": "SMAttn", "lr": 0.1, "training": {"fields": {"hidden_size": 3}}},
            "mix different models of one name",
        ),
    ],
)
def test_results_that_cannot_be_compared_are_an_error_that_says_why(other: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rows([record(), record(**{"model": "FEM-SM", **other})])


def test_a_job_that_is_in_two_stores_counts_once() -> None:
    records = finished(("SMAttn",))
    assert rows([*records, *(json.loads(json.dumps({**each, "seconds": 2.0})) for each in records)]) == rows(records)


def test_the_command_writes_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number, models in enumerate((("SMAttn", "SMAttn+L"), ("FEM-SM", "RetNet"))):
        export(finished(models, seeds=2), tmp_path / f"{number}.json", TASK.kind)
    out = tmp_path / "out"
    paths = [str(tmp_path / "0.json"), str(tmp_path / "1.json")]
    assert main(["mad", "table", "--results", *paths, "--out", str(out), "--select", "test"]) == 0
    assert {path.name for path in out.iterdir()} == {
        "table.md",
        "table.tex",
        "table.csv",
        "heatmap.png",
        "ablation.png",
    }
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out and "Selected on the test split" in text
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("heatmap.png", "ablation.png"))


def test_nothing_to_tabulate_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    export([], tmp_path / "none.json", TASK.kind)
    assert main(["mad", "table", "--results", str(tmp_path / "none.json")]) == 2
    assert "finished" in capsys.readouterr().err
    assert main(["mad", "table", "--results", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_sizes_are_relative_to_plain_attention_on_the_same_settings() -> None:
    records = finished(("SMAttn", "FEM-SM"))
    for record in records:
        record["parameter_count"] = 1000 if record["model"] == "SMAttn" else 1250
    assert sizes(records) == {"SMAttn": "1.00", "FEM-SM": "1.25"}
