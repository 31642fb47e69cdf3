"""`femixer forecast table` on made-up results: means over horizons, the published figures, and the files."""

import csv

import numpy as np
import pytest

from femixer.cli import main
from femixer.reporting import Cell, as_csv, as_latex, as_markdown
from femixer.tasks.forecast import TASK
from femixer.tasks.forecast.data import LOOKBACKS
from femixer.tasks.forecast.table import COLUMNS, MEANS, NO_SEASON, PER_HORIZON, tabulate
from femixer.training.store import export


def record(model="FEM-SM", dataset="ETTh1", horizon=96, mse=0.4, **fields):
    return {
        "model": model,
        "dataset": dataset,
        "horizon": horizon,
        "lookback": LOOKBACKS[horizon],
        "seed": 0,
        "mse": mse,
        "mae": mse / 2,
        "validation_mse": 0.7,
        "best_step": 7,
        "diverged": None,
        "fingerprint": dataset,
        "fields": {"kind": model},
        "training": {"epochs": 100, "lr": 6e-4, "weight_decay": 0.1},
        "environment": {"femixer": "0.1.0"},
        **fields,
    }


def entries(records, metric="mse"):
    """(data set, look-back, horizon, model) -> entry."""
    table = tabulate(records)[("mse", "mae").index(metric)]
    return {
        (*row[:3], model): each
        for row in table.rows
        for model, each in zip(table.header, row, strict=True)
        if isinstance(each, Cell)
    }


def test_the_mean_over_horizons_stands_beside_the_papers():
    errors = {96: 0.37, 192: 0.41, 336: 0.43, 720: 0.454}
    records = [record(horizon=h, mse=mse + 0.02 * seed, seed=seed) for h, mse in errors.items() for seed in (0, 1)]
    found = entries(records)
    mean = found["ETTh1", "protocol", "mean", "FEM-SM"]
    assert (mean.value, mean.error, mean.paper, mean.best, mean.missing) == ("0.426", "0.010", "0.419", True, "")
    assert found["ETTh1", "protocol", "96", "FEM-SM"].value == "0.380"
    assert entries(records, "mae")["ETTh1", "protocol", "mean", "FEM-SM"].value == "0.213"
    assert not any(each.paper for each in entries(records, "mae").values())


def test_a_mean_over_other_horizons_does_not_stand_beside_the_papers():
    found = entries([record(horizon=96), record(horizon=192), record("DLinear", horizon=96, mse=0.375)])
    ours = found["ETTh1", "protocol", "mean of 96, 192", "FEM-SM"]
    assert (ours.value, ours.paper) == ("0.400", "")
    theirs = found["ETTh1", "protocol", "mean of 96, 192, 336, 720", "FEM-SM"]
    assert (theirs.value, theirs.paper) == ("", "0.419")
    published = found["ETTh1", "protocol", "96", "DLinear"]
    assert (published.value, published.paper, published.best) == ("0.375", "0.375", True)
    part = found["ETTh1", "protocol", "mean of 96, 192", "DLinear"]
    assert (part.value, part.missing, part.best) == ("", "1 of 2 jobs", False)
    assert "| [1 of 2 jobs] |" in as_markdown(*tabulate([record(horizon=96), record(horizon=192), record("DLinear")]))


def test_a_season_that_is_not_there_is_told():
    naive, last = record("SeasonalNaive", mse=0.5), record("LastValue", mse=0.5)
    assert NO_SEASON in tabulate([record(), naive, last])[-1].notes
    assert NO_SEASON not in tabulate([record(), {**naive, "mse": 0.4}, last])[-1].notes


def test_missing_seeds_are_marked_and_never_best():
    found = entries([record(seed=0), record(seed=1), record("SMAttn", mse=0.1), record("GLA")])
    best, *others = (found["ETTh1", "protocol", "96", model] for model in ("FEM-SM", "SMAttn", "GLA"))
    assert best.best and not best.missing
    assert [(each.missing, each.best) for each in others] == [("1 of 2 seeds", False)] * 2


def test_other_lookbacks_are_rows_of_their_own():
    found = entries([record(), record(lookback=336, mse=0.3), record(dataset="mine", lookback=5)])
    assert [key[:3] for key in found] == [
        ("ETTh1", "protocol", "96"),
        ("ETTh1", "protocol", "mean of 96, 192, 336, 720"),
        ("ETTh1", "336", "96"),
        ("ETTh1", "336", "mean of 96, 192, 336, 720"),
        ("mine", "5", "96"),
    ]


def test_learning_rates_are_chosen_by_validation():
    def rate(lr, validation, mse, **fields):
        return record(
            training={"epochs": 100, "lr": lr, "weight_decay": 0.1}, validation_mse=validation, mse=mse, **fields
        )

    records = [
        rate(1e-3, 0.5, 0.44),
        rate(1e-4, 0.6, 0.33),
        rate(1e-3, 0.9, 0.46, seed=1),
        rate(1e-4, 0.6, 0.31, seed=1),
    ]
    assert (
        entries(records)["ETTh1", "protocol", "96", "FEM-SM"].value == "0.320"
    )  # the mean of 0.6 is below that of 0.7
    assert entries(records[:3])["ETTh1", "protocol", "96", "FEM-SM"].value == "0.450"  # one seed alone may be luck
    assert any(
        "rate and weight decay are those of the lowest validation MSE." in t for t in tabulate(records)[-1].notes
    )
    shorter = [
        record(training={**each["training"], "epochs": 10}, seed=each["seed"], mse=0.3, validation_mse=0.4)
        for each in records[::2]
    ]
    with pytest.raises(ValueError, match="ways of training"):
        tabulate([*records, *shorter])
    both = tabulate([*records, *shorter], ("lr", "weight_decay", "epochs"))
    assert both[0].rows[0][-1].value == "0.300"
    assert any("number of epochs are those" in text for text in both[-1].notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"environment": {"femixer": "0.2.0"}}, "versions of femixer"),
        ({"fingerprint": "other"}, r"data of one name \(dataset \"ETTh1\"\)"),
        ({"training": {"epochs": 3, "lr": 6e-4, "weight_decay": 0.1}}, "ways of training"),
        ({"fields": {"kind": "fem", "hidden_size": 8}}, "models of one name"),
        ({"seed": 0, "mse": 0.5}, "results of one job"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(change, told):
    with pytest.raises(ValueError, match=f"results mix different {told}"):
        tabulate([record(), record(**{"seed": 1, **change})])
    assert entries([record(), record()]) == entries([record()])  # twice the same is once


def test_the_files_of_a_table(tmp_path, capsys):
    records = [record("FEM-SM", "my_data", diverged="at step 3"), record("GLA", "my_data", mse=0.5)]
    export(records, tmp_path / "all.json", TASK.kind)
    out = tmp_path / "table"
    assert main(["forecast", "table", "--results", str(tmp_path / "all.json"), "--out", str(out)]) == 0
    tables = tabulate(records)
    assert (out / "table.md").read_text() == as_markdown(*tables) and as_markdown(*tables) in capsys.readouterr().out
    assert "| my_data | protocol | 96 | **0.400** | 0.500 |" in as_markdown(*tables)
    assert "Training diverged, in some runs, of FEM-SM" in as_markdown(
        *tables
    ) and "GLA, Mamba and AFT are" in as_markdown(*tables)
    tex = (out / "table.tex").read_text()
    assert tex == as_latex(*tables) and r"my\_data & protocol & 96 & \makecell{\textbf{0.400}}" in tex
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    lines = [*csv.DictReader((out / "table.csv").read_text().splitlines())]
    assert as_csv(*tables) == (out / "table.csv").read_text() and len(lines) == 4
    assert [line["value"] for line in lines] == ["0.400", "0.500", "0.200", "0.250"]
    export([], tmp_path / "none.json", TASK.kind)
    assert main(["forecast", "table", "--results", str(tmp_path / "none.json")]) == 2
    assert "stores where `femixer forecast run` has finished some" in capsys.readouterr().err


def test_published_rows_average_to_the_papers_figures():
    for place, errors in PER_HORIZON.items():
        assert np.mean([*errors.values()]) == pytest.approx(MEANS[place], abs=1.1e-3)
    assert len(MEANS) == 6 * len(COLUMNS)
