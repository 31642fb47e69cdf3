"""`femixer vision table` on made-up results: means, the paper's figures, what may be compared, and the files."""

import csv

import pytest

from femixer.cli import main
from femixer.reporting import as_csv, as_latex, as_markdown
from femixer.tasks.vision import TASK
from femixer.tasks.vision.table import tabulate
from femixer.training.store import export


def record(model="FEM-SM", dataset="imagenet-1k", top1=0.76, **fields):
    return {
        "model": model,
        "preset": "deit-tiny",
        "dataset": dataset,
        "classes": 1000,
        "seed": 0,
        "top1": top1,
        "top5": 0.93,
        "loss": 1.0,
        "broken": 0,
        "validation_top1": 0.75,
        "seconds": 100.0,
        "parameter_count": 5_780_000,
        "diverged": None,
        "fingerprint": dataset,
        "eval_crop": 0.875,
        "fields": {"prior": model},
        "training": {"epochs": 300, "lr": 1e-3, "weight_decay": 0.05},
        "augmentation": {"flip": 0.5},
        "environment": {"femixer": "0.1.0"},
        **fields,
    }


def test_a_table_has_means_errors_and_the_papers_figures(tmp_path, capsys):
    found = [
        *(record(top1=top1, seed=seed) for seed, top1 in enumerate((0.75, 0.77))),
        *(record("SMAttn", top1=0.72, seed=seed, parameter_count=5_717_000) for seed in range(2)),
        record("GLA", top1=0.79, diverged="at step 3", broken=7),
        record("FEM-SM", "my_data", top1=0.5),
    ]
    export(found, tmp_path / "all.json", TASK.kind)
    out = tmp_path / "table"
    assert main(["vision", "table", "--results", str(tmp_path / "all.json"), "--out", str(out)]) == 0
    text = as_markdown(*tabulate(found))
    assert (out / "table.md").read_text() == text and text in capsys.readouterr().out
    assert "| SMAttn | 5,717,000 | 72.00 ± 0.00 (72.20) |" in text
    assert "| FEM-SM | 5,780,000 | **76.00** ± 1.00 (76.70) |" in text  # GLA lacks a seed
    assert "| GLA | 5,780,000 | 79.00 [1 of 2 seeds] |" in text
    assert "Parameters of imagenet-1k, deit-tiny differ by 1.1% at most." in text and "7 images" in text
    assert "Training diverged, in some runs, of GLA" in text
    assert (out / "table.tex").read_text() == as_latex(*tabulate(found)) and r"my\_data, deit-tiny" in as_latex(
        *tabulate(found)
    )
    numbers = [*csv.DictReader((out / "table.csv").read_text().splitlines())]
    assert as_csv(*tabulate(found)) == (out / "table.csv").read_text() and len(numbers) == 12
    assert [line["paper"] for line in numbers if line["metric"] == "top1"] == ["72.20", "76.70", "", ""]


def test_learning_rates_are_chosen_by_validation():
    slow, fast = ({"epochs": 300, "lr": lr, "weight_decay": 0.05} for lr in (1e-4, 1e-3))
    found = [record(top1=0.7, validation_top1=0.8, training=slow), record(top1=0.9, validation_top1=0.6, training=fast)]
    (table,) = tabulate(found)
    assert table.rows[0][3].value == "70.00" and "highest validation" in " ".join(table.notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"environment": {"femixer": "0.2.0"}}, "versions of femixer"),
        ({"fingerprint": "other"}, "images of one name"),
        ({"augmentation": {"flip": 0}}, "ways of training"),
        ({"parameter_count": 8}, "models of one name"),
        ({"seed": 0, "top1": 0.1}, "results of one job"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(change, told):
    with pytest.raises(ValueError, match=f"results mix different {told}"):
        tabulate([record(), record(**{"seed": 1, **change})])
