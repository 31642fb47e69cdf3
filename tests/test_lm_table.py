"""`femixer lm table`: evaluation results in the paper's layout, ranked as it ranks them."""

import csv
import json

from femixer.cli import main
from femixer.reporting import half_up, rank
from femixer.tasks.lm.harness import COLUMNS
from femixer.tasks.lm.table import Evaluated, grouped, read, size

PAPER_340M = """
109 259 299 008 390 266 133 289 531 408 668 603 534 690 330 734  4.38 1
113 260 296 010 421 258 133 276 527 396 662 588 527 710 338 735  4.25 1
112 260 300 009 452 277 150 269 502 405 653 519 504 690 316 717  5.44 3
106 267 292 010 386 269 126 273 506 396 650 569 499 720 324 727  6.50 1
113 254 296 009 388 246 122 277 507 403 664 583 515 670 320 728  6.63 0
112 258 298 009 401 254 129 290 518 407 657 595 511 690 342 731  4.81 1
112 261 297 010 421 266 144 293 531 412 668 593 519 710 338 716  3.31 2
114 264 300 012 437 273 142 284 542 409 676 609 523 730 342 735  1.81 8
110 258 289 007 415 228 109 247 478 366 637 547 489 640 294 649  9.38 0
115 255 297 009 473 241 123 271 493 397 644 592 510 680 331 683  6.56 2
"""


def test_the_ranks_of_the_papers_values_are_those_that_it_prints():
    rows = [line.split() for line in PAPER_340M.split("\n") if line]
    rankings = rank([[int(value) / 1000 for value in row[:16]] for row in rows])
    assert [f"{half_up(ranking.average):.2f}" for ranking in rankings] == [row[16] for row in rows]
    assert [ranking.firsts for ranking in rankings] == [int(row[17]) for row in rows]


def evaluated(folder, values, parameters=340_000_000, limit=None, shots=None):
    """A results folder of `femixer eval` with these values of the paper's columns, by title."""
    tasks = {}
    for column in COLUMNS:
        if column.title in values:
            used = (shots or {}).get(column.title, column.shots)
            task = tasks.setdefault(column.task, {"shots": used, "metrics": {}})
            task["metrics"][column.metric] = {"value": values[column.title], "stderr": 0.01}
    folder.mkdir(parents=True)
    settings = {"model": folder.name, "limit": limit}
    (folder / "results.json").write_text(json.dumps({"parameters": parameters, "settings": settings, "tasks": tasks}))
    return folder


def test_the_table_has_the_papers_layout_with_best_and_second_marked(tmp_path, capsys):
    first = evaluated(tmp_path / "one", {"MATH": 0.01251, "HS": 0.4, "SciQ": 0.7004})
    second = evaluated(tmp_path / "two", {"MATH": 0.01249, "HS": 0.5, "SciQ": 0.7001}, 351_000_000)
    third = evaluated(tmp_path / "three", {"HS": 0.45}, 355_000_000)
    large = evaluated(tmp_path / "large", {"HS": 0.9}, 1_300_000_000)
    out = tmp_path / "table"
    args = [f"FEM_SM={first}", f"Attention|plain={second}", str(third), str(large)]
    assert main(["lm", "table", *args, "--out", str(out)]) == 0
    lines = (out / "table.md").read_text().split("\n")
    head, _, title, big, group, fem, attention, other = ([cell.strip() for cell in _cells(line)] for line in lines[:8])
    at = {name.split(" ")[0]: index for index, name in enumerate(head)}
    assert head[1] == "MMLU-P (Acc ↑)" and head[-2:] == ["Avg Rank ↓", "#Top1 ↑"] and len(head) == 19
    assert title[0] == "**1.3B parameters**" and group[0] == "**350M parameters**"
    assert (big[at["HS"]], big[-2:]) == ("0.900", ["1.00", "1"])  # alone in its group, so nothing is marked
    # MATH 0.013 > 0.012; HS 0.5 > 0.45 > 0.4; SciQ 0.700 = 0.700, although they differ in the fourth digit
    assert [fem[at[name]] for name in ("MATH", "HS", "SciQ")] == ["**0.013**", "0.400", "**0.700**"]
    assert [attention[at[name]] for name in ("MATH", "HS", "SciQ")] == ["<u>0.012</u>", "**0.500**", "**0.700**"]
    assert other[at["HS"]] == "<u>0.450</u>" and other[at["MATH"]] == "" == fem[at["GPQA"]]
    assert fem[-2:] == ["<u>1.67</u>", "**2**"]  # ranks 1, 3, 1
    assert attention[-2:] == ["**1.33**", "**2**"]  # 2, 1, 1
    assert other[-2:] == ["2.00", "<u>0</u>"]  # 2
    assert fem[0] == "FEM_SM" and attention[0] == "Attention\\|plain" and other[0] == "three"
    assert "Some values are missing" in capsys.readouterr().out
    tex = (out / "table.tex").read_text()
    assert r"FEM\_SM & -- & -- & -- & \textbf{0.013} & " in tex and r"\underline{1.67} & \textbf{2} \\" in tex
    assert r"\cmidrule(lr){2-8}\cmidrule(lr){9-17}\cmidrule(lr){18-19}" in tex
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["large", "FEM_SM", "Attention|plain", "three"]
    assert (rows[1]["MATH"], rows[1]["GPQA"], rows[1]["avg_rank"], rows[1]["top1"]) == ("0.013", "", "1.67", "2")


def _cells(line):
    return line.replace("\\|", "\0").strip("|").replace("|", "\n").replace("\0", "\\|").split("\n")


def test_groups_are_as_given_or_by_size():
    def row(name, parameters, group=None):
        return Evaluated(name, group, parameters, (None,) * len(COLUMNS))

    groups = grouped([row("a", 100), row("b", 91), row("c", 89), row("d", 500, "mine"), row("e", 70, "mine")])
    assert [(title, [row.name for row in rows]) for title, rows in groups.items()] == [
        ("mine", ["d", "e"]), ("96 parameters", ["a", "b"]), ("89 parameters", ["c"])
    ]  # fmt: skip
    assert [size(n) for n in (1.31e9, 341e6, 12.4e6, 1.24e6, 9_960, 999_000)] == [
        "1.3B", "340M", "12M", "1.2M", "10K", "1.0M"
    ]  # fmt: skip


def test_other_shots_and_limits_are_told(tmp_path):
    folder = evaluated(tmp_path / "run", {"HS": 0.4, "BBH": 0.3}, limit=20.0, shots={"BBH": 0})
    row = read(f"1.3B, 100B tokens/mine={folder}")
    assert (row.name, row.group) == ("mine", "1.3B, 100B tokens")
    assert [value for value in row.values if value is not None] == [0.4]
    assert row.notes == (
        "mine: only a part of each task (--limit 20)",
        "mine: BBH left out, evaluated with 0 shots instead of 3",
    )


def test_a_folder_without_results_is_an_error(tmp_path, capsys):
    assert main(["lm", "table", f"x={tmp_path}", "--out", str(tmp_path / "out")]) == 2
    assert "is no results folder of `femixer eval`" in capsys.readouterr().err
    assert main(["lm", "table"]) == 2
    assert not (tmp_path / "out").exists()
