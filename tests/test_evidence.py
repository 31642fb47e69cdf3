"""`femixer evidence`: paired differences of recorded results."""

import json
import math
import statistics

import pytest

from femixer.cli import main
from femixer.reporting.table import Difference, student
from femixer.tasks.evidence import load, tabulate
from femixer.tasks.lm.runs import draw_curves


def test_interval_by_hand() -> None:
    found = Difference.of([1.0, 2.0, 4.5])
    # t(2) = 4.303, deviation of (1, 2, 4.5) = 1.8027756
    assert found.mean == pytest.approx(2.5)
    assert found.half_width == pytest.approx(4.303 * 1.8027756 / math.sqrt(3))
    assert not found.is_told_apart
    assert Difference.of([1.0, 1.1, 0.9]).is_told_apart
    assert not Difference.of([5.0]).is_told_apart  # a single pair tells nothing


def test_quantiles_fall_towards_the_normal_ones() -> None:
    quantiles = [student(freedom) for freedom in range(1, 500)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] >= statistics.NormalDist().inv_cdf(0.975)


def comparison(folder, losses: dict[str, list[float]], text: str = "a text", **mixing: str | None) -> None:
    """What `femixer lm compare` leaves: one folder per run, finished ones with a table."""
    model = {"preset": "tiny", "hidden_size": 8, "layers": 1, "heads": 1, "mixing": mixing}
    folder.mkdir()
    config = {"task": "lm compare", "experiment": {"experiment": {"model": model}}, "text": f"/home/me/{text}"}
    (folder / "config.json").write_text(json.dumps(config))
    for name, each in losses.items():
        for seed, loss in enumerate(each):
            run = folder / "runs" / (f"{name} seed {seed}" if seed % 2 else f"{name}-seed-{seed}")
            run.mkdir(parents=True)
            experiment = {"seed": seed, "lr": 0.1, "model": model}
            (run / "config.json").write_text(json.dumps({"task": "lm", "experiment": experiment}))
            records = [{"step": step, "split": "validation", "loss": loss + 1 - step} for step in range(2)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            if math.isfinite(loss):
                (run / "table.md").write_text("done")


def test_pairs_are_of_one_seed(tmp_path, capsys) -> None:
    """Seeds differ by far more than models do; what is told apart is the difference of each seed."""
    comparison(tmp_path / "runs", {"SMAttn": [1.0, 2.0, 3.0], "FEM-SM": [0.99, 1.98, 2.99, math.nan]})
    assert main(["lm", "export", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "lm.json")]) == 0
    assert main(["evidence", "--results", str(tmp_path / "lm.json"), "--out", str(tmp_path / "out")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| a text"))
    half = 4.303 * statistics.stdev([10, 20, 10]) / math.sqrt(3)
    assert f"+13.3 [{13.3333 - half:+.1f}, {13.3333 + half:+.1f}], 3" in row
    assert "| – | – | – |" in row


def test_better_is_above_zero_whatever_the_measure(tmp_path) -> None:
    comparison(tmp_path / "runs", {"SMAttn": [1.0, 1.1], "FEM-SM": [0.5, 0.6], "GLA": [1.0, 1.1], "FEM-GLA": [2, 2.1]})
    (table,) = [tabulate(load([tmp_path / "runs"]))]
    worse, better = table.rows[0][2], table.rows[0][1]
    assert str(better.value).startswith("+500") and not better.best  # type: ignore[union-attr]  # of two pairs
    assert str(worse.value).startswith("-1000")  # type: ignore[union-attr]


def test_options_of_the_mixers_are_rows_with_the_same_priors(tmp_path) -> None:
    comparison(tmp_path / "a", {"SMAttn": [1.0, 1.1], "FEM-SM": [0.5, 0.6]}, start=None)
    comparison(tmp_path / "b", {"FEM-SM": [0.75, 0.85]}, start="prior")
    assert main(["lm", "export", "--results", *(str(tmp_path / n) for n in "ab"), "--out", str(tmp_path / "c")]) == 0
    assert "/home/me" not in (tmp_path / "c").read_text()  # a machine's folders are nobody's business
    rows = {str(row[0]): str(row[1].value) for row in tabulate(load([tmp_path / "c"])).rows}  # type: ignore[union-attr]
    assert rows["a text"].startswith("+500") and rows["a text, start=prior"].startswith("+250")
    assert rows["all"].startswith("+500") and rows["all"].endswith(", 2")  # the same priors are counted once


def test_each_text_has_a_row(tmp_path) -> None:
    for name, gain in {"songs.txt": 0.5, "laws": 0.25}.items():
        comparison(tmp_path / name, {"SMAttn": [1.0, 1.1], "FEM-SM": [1.0 - gain, 1.1 - gain]}, name)
    rows = {str(row[0]): str(row[1].value) for row in tabulate(load([tmp_path / "songs.txt", tmp_path / "laws"])).rows}
    assert rows["songs"].startswith("+500") and rows["laws"].startswith("+250") and rows["all"].startswith("+375")
    comparison(tmp_path / "other", {"SMAttn": [1.0, 1.1], "FEM-SM": [0.5, 0.6]}, "songs.md")
    rows = {str(row[0]) for row in tabulate(load([tmp_path / "songs.txt", tmp_path / "other"])).rows}
    assert {"songs.txt", "songs.md"} <= rows  # by their whole names where two have one stem


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_is_no_result_is_named(tmp_path, capsys, content) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    assert main(["evidence", "--results", str(path)]) == 2
    error = capsys.readouterr().err
    assert "results=" in error and "some.json" in error and len(error.splitlines()) == 1


def test_two_results_of_one_run_are_an_error(tmp_path, capsys) -> None:
    for number, loss in enumerate((1.0, 1.5)):
        comparison(tmp_path / f"{number}", {"SMAttn": [loss], "FEM-SM": [1.0]})
    given = [str(tmp_path / f"{number}") for number in range(2)]
    assert main(["evidence", "--results", *given, "--out", str(tmp_path / "out")]) == 2
    assert "results='SMAttn, seed 0' is not allowed" in capsys.readouterr().err
    comparison(tmp_path / "run", {})
    assert main(["evidence", "--results", given[0], "--out", str(tmp_path / "run")]) == 2
    assert "holds a run" in capsys.readouterr().err


def test_damaged_records_are_named(tmp_path, capsys) -> None:
    comparison(tmp_path / "runs", {"SMAttn": [1.0]})
    path = tmp_path / "lm.json"
    assert main(["lm", "export", "--results", str(tmp_path / "runs"), "--out", str(path)]) == 0
    whole = json.loads(path.read_text())
    for change, message in (({"loss": None}, "loss=None"), ({"curve": [[0, 1.0]]}, "evaluated after their start")):
        path.write_text(json.dumps({**whole, "records": [{**whole["records"][0], **change}]}))
        assert main(["lm", "curves", "--results", str(path), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    del whole["records"][0]["curve"]
    path.write_text(json.dumps(whole))
    assert main(["lm", "curves", "--results", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "curve is missing" in capsys.readouterr().err


def test_curves_are_of_recorded_runs(tmp_path, capsys) -> None:
    comparison(tmp_path / "a", {"SMAttn": [1.0, 2.0], "FEM-SM": [0.5, 1.5]}, "songs.txt")
    comparison(tmp_path / "b", {"GLA": [0.25]}, "songs.txt")
    command = ["lm", "curves", "--out", str(tmp_path / "out"), "--results"]
    assert main([*command, str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert "| SMAttn | 1.5000 ± 0.7071 |" in shown and "| FEM-SM | **1.0000** ± 0.7071 |" in shown
    assert "| GLA | 0.2500 [1 of 2 seeds] |" in shown  # not the best, though lowest: it lacks the harder seed
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    assert main([*command, str(tmp_path / "a"), "--models", "FEM-SM"]) == 0
    assert "SMAttn" not in capsys.readouterr().out
    assert main([*command, str(tmp_path / "a"), "--models", "AFT"]) == 2
    assert "models='AFT' is not allowed; choose some of FEM-SM; SMAttn" in capsys.readouterr().err


@pytest.mark.parametrize("count", [8, 9])
def test_the_names_of_many_curves_do_not_cover_them(count: int) -> None:
    run = {"curve": [[0, 5.0], [1, 3.0], [2, 2.0]]}
    drawing = draw_curves({"a text": {f"model {number}": {0: run} for number in range(count)}})
    drawing.draw_without_rendering()
    (axes,) = drawing.axes
    (legend,) = [axes.get_legend()] if count == 8 else drawing.legends
    assert len(legend.get_texts()) == count
    assert legend.get_window_extent().overlaps(axes.get_window_extent()) == (count == 8)


def test_any_two_models_can_be_compared(tmp_path, capsys) -> None:
    comparison(tmp_path / "runs", {"SMAttn": [3.0, 3.1], "SMAttn+C,G": [1.0, 1.1], "FEM-SM": [0.5, 0.6]})
    arguments = ["evidence", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--pairs"]
    assert main([*arguments, "FEM-SM:SMAttn+C,G", "SMAttn+C,G:SMAttn"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| a text"))
    assert "| +500.0 [" in row and "| +2000.0 [" in row
    for wrong in ("FEM-SM", "FEM-SM:SMAtn", "FEM-SM-SMAttn", "FEM-SM:FEM-SM"):
        assert main([*arguments, wrong]) == 2
        assert f"pairs={wrong!r}" in capsys.readouterr().err
    assert main([*arguments, "FEM-SM:SMAttn", "FEM-SM:SMAttn"]) == 2
    assert "pairs=('FEM-SM:SMAttn', 'FEM-SM:SMAttn') is not allowed" in capsys.readouterr().err
