"""Tables: every format shows the text that it is given, what is best is what is shown as best, nothing is lost."""

import csv
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from femixer import reporting
from femixer.reporting import (
    Cell,
    Column,
    Group,
    Score,
    Table,
    as_csv,
    as_html,
    as_latex,
    as_markdown,
    difference,
    half_up,
    marked,
    marked_columns,
    mean_of,
    rank,
    show,
    write,
)
from femixer.reporting.figures import COLOURS, figure, looks, plain_log, quiet, save
from femixer.reporting.table import Ranking, best_two, number, ranks, transposed
from femixer.reporting.writers import in_csv, in_latex, in_markdown, one_line

# Any text, and texts that are made of what some format takes for more than text.
PIECES = [*"\\`*_|~$<>[]()!#&+-=@%{}^:.\"' \n\t1aé±–≤µ↑", "&amp;", "](", "<b>", "--"]
SPECIAL = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | SPECIAL


class Reader(HTMLParser):
    """Texts of elements by tag, in the order they end."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.opened: list[tuple[str, list[str]]] = []
        self.feed(source)
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("br", "hr", "img"):
            self.texts.setdefault(tag, []).append("")
        else:
            self.opened.append((tag, []))

    def handle_data(self, data: str) -> None:
        for _, text in self.opened:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        opened, text = self.opened.pop()
        assert opened == tag
        self.texts.setdefault(tag, []).append("".join(text).strip())


def rendered(markdown: str) -> dict[str, list[str]]:
    return Reader(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)).texts


@given(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS)
@example("_a_ b", "[a]: b", "*a* _b_ `c` ~~d~~ <b> &lt; [e](f) ![g](h) a|b \\", "__a__", "1) a")
@example("1. a", "***", "[a]", "![a]", "[a]: b")
@example("# a", "a_b_c", "<!-- a -->", "--", "> a")
@example("- a", "a|b", "|", "$a$", "+ a")
@example("---", "===", "\\|", "https://a.b", "```")
def test_markdown_shows_every_text_as_it_is(title: str, head: str, text: str, group: str, note: str) -> None:
    columns = [Column("model"), Column(head or "x", key="a", scores=True), Column("c", align="right")]
    table = Table(columns, [Group([[text, Cell(text, mark="best"), text]], group)], title, [note])
    shown = rendered(as_markdown(table))
    assert shown["th"] == ["model", one_line(head or "x"), "c"]
    *above, first, second, third = shown["td"]
    assert [first, second, third] == [one_line(text), one_line(text) or "–", one_line(text)]
    assert above == ([one_line(group), "", ""] if group else []) or not one_line(group)
    assert shown.get("p", []) == [one_line(each) for each in (title, note) if one_line(each)]
    assert {*shown} <= {"table", "thead", "tbody", "tr", "th", "td", "p", "strong"}


@given(TEXTS, TEXTS, TEXTS)
def test_html_shows_every_text_as_it_is(title: str, text: str, note: str) -> None:
    table = Table(
        [Column(text, key="a"), Column("two\nlines", block=text)], [Group([[text, text]], text)], title, [note]
    )
    shown = Reader(as_html(table)).texts
    assert shown["td"] == [one_line(text)] * 2
    assert shown["p"] == [one_line(note)]
    assert shown.get("caption", [""]) == [one_line(title)]
    assert "twolines" in shown["th"] and shown["br"]


LATEX_WORDS = {
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">",
    "textbar": "|", "ldots": "…", "pm": "±", "le": "≤", "ge": "≥", "times": "×", "mu": "µ", "uparrow": "↑",
    "downarrow": "↓",
}  # fmt: skip
LATEX = re.compile(r"\\([a-zA-Z]+)(?:\{\})?|\\([&%$#_{}])|\{([\[*])\}|\$|([^\\{}$&%#_^~<>|\[*])")


def latex_read(source: str) -> str:
    """What LaTeX prints; fails on a character that would mean something to it."""
    out, at = [], 0
    while at < len(source):
        found = LATEX.match(source, at)
        assert found is not None, f"{source[at:]!r} is not plain text"
        word, sign, braced, plain = found.groups()
        out.append(LATEX_WORDS[word] if word else sign or braced or plain or "")
        at = found.end()
    return "".join(out)


@given(TEXTS)
def test_latex_prints_every_text_as_it_is(text: str) -> None:
    plain = one_line(text).replace("—", "---").replace("–", "--").replace("μ", "µ")
    assert latex_read(in_latex(text)) == plain


@given(st.lists(TEXTS, min_size=2, max_size=2), TEXTS)
def test_csv_keeps_every_text_and_a_spreadsheet_runs_none(cells: list[str], title: str) -> None:
    table = Table([Column("model"), Column("size", align="right")], [Group([cells])], title)
    (line,) = csv.DictReader(io.StringIO(as_csv(table)))
    for name, text in {"model": cells[0], "size": cells[1], "table": title}.items():
        found = line.get(name, "")
        assert found.removeprefix("'") == one_line(text).removeprefix("'")
        assert found[:1] not in {*"=+-@\t\r"} or re.fullmatch(r"[+-][\d.,eE+-]+%?", found, re.ASCII)


def test_only_text_is_kept_from_being_a_formula() -> None:
    assert in_csv("=1+1") == "'=1+1" and in_csv("@x") == "'@x" and in_csv(" -x") == "'-x" and in_csv("＝1") == "'＝1"
    assert [in_csv(text) for text in ("-0.3", "+1,234.5", "-1e-3", "1=1", "–")] == [
        *("-0.3", "+1,234.5", "-1e-3", "1=1", "–")
    ]
    assert in_csv("-inf") == "'-inf"  # a spreadsheet knows no such number


def test_what_is_harmless_in_markdown_stays_readable() -> None:
    for text in ("FEM_SM", "1.200 [1.100–1.300] ≤ 1.20", "0.8 < 0.85", "a & b", "(--limit 20)", "gla:decay=channel"):
        assert in_markdown(text) == text
    assert in_markdown("a|b") == "a\\|b"


SCORES = st.dictionaries(st.integers(0, 7), st.floats(-1e3, 1e3), max_size=5)


@given(SCORES)
def test_mean_deviation_and_error_are_those_of_the_definition(scores: dict[int, float]) -> None:
    score = Score(scores, len(scores))
    values = [*scores.values()]
    if not values:
        assert score.mean is score.error is None and score.cell(3) == Cell()
        return
    assert score.mean == pytest.approx(math.fsum(values) / len(values)) and score.complete and not score.missing
    if len(values) > 1:
        deviation = math.sqrt(math.fsum((v - score.mean) ** 2 for v in values) / (len(values) - 1))
        assert score.deviation == pytest.approx(deviation, abs=1e-9)
        assert score.error == pytest.approx(deviation / math.sqrt(len(values)), abs=1e-9)
    else:
        assert score.error is score.deviation is None


def test_a_score_is_shown_with_its_spread_and_what_is_missing() -> None:
    score = Score({0: 0.2, 1: 0.3, 2: 0.7}, 3)
    assert score.cell(1, 100, paper="99.9") == Cell("40.0", "15.3", "", "99.9")
    assert score.cell(3, spread="deviation") == Cell("0.400", "0.265")
    assert Score({0: 0.5, 2: 0.5}, 3).cell(1, 100) == Cell("50.0", "0.0", "2 of 3 seeds")
    assert Score({}, 3, 5, 6).cell(1, paper="7") == Cell("", "", "5 of 6 jobs", "7")
    assert Score({}, 3).cell(2, paper="7") == Cell(paper="7")
    assert Score({0: 0.004}, 1).cell(2, signed=True).value == "+0.00"


@given(SCORES, SCORES, st.floats(-100, 100))
def test_a_difference_is_of_the_same_seed_so_that_what_a_seed_does_to_both_cancels(
    ours: dict[int, float], theirs: dict[int, float], luck: float
) -> None:
    shared = sorted({*ours} & {*theirs})
    found = difference(Score(ours, 8), Score(theirs, 8))
    assert found.scores == {seed: ours[seed] - theirs[seed] for seed in shared}
    assert found.complete == (len(shared) == 8)
    shifted = [Score({seed: value + luck * seed for seed, value in each.items()}, 8) for each in (ours, theirs)]
    assert [*difference(*shifted).scores.values()] == pytest.approx([*found.scores.values()], abs=1e-9)


def test_a_mean_over_tasks_is_of_the_seeds_that_all_have() -> None:
    found = mean_of([Score({0: 1.0, 1: 3.0}, 3, 2, 3), Score({1: 5.0, 2: 7.0}, 3, 2, 3)])
    assert found == Score({1: 4.0}, 3, 4, 6) and found.missing == "1 of 3 seeds"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", 1234.5), ("+0.3", 0.3), ("-4%", -4), ("1e-3", 1e-3), (".5", 0.5)]
    + [(text, None) for text in ("", "nan", "inf", "1.2 s", "²", "٣", "1_000")],
)
def test_a_shown_number_is_read_back(text: str, value: float | None) -> None:
    assert number(text) == value


@given(st.lists(st.floats(-2, 2) | st.none(), max_size=9), st.booleans())
def test_marks_are_on_the_best_as_shown_and_on_the_next(values: list[float | None], higher: bool) -> None:
    cells = [Cell() if value is None else Cell(f"{value:.1f}") for value in values]
    shown = [float(cell.value) for cell in cells if cell.value]
    for cell in marked(cells, higher, second=True):
        if not cell.value:
            assert cell.mark == ""
            continue
        better = {each for each in shown if (each > float(cell.value) if higher else each < float(cell.value))}
        assert cell.mark == {0: "best", 1: "second"}.get(len(better), "")
    assert [cell.best for cell in marked(cells, higher)] == [cell.best for cell in marked(cells, higher, second=True)]
    assert all(cell.mark != "second" for cell in marked(cells, higher))


def test_what_is_not_finished_is_never_best() -> None:
    cells = marked([Cell("0.9", missing="1 of 2 seeds"), Cell("0.5"), Cell("nan"), Cell(paper="1.0"), Cell("0.5")])
    assert [cell.best for cell in cells] == [False, True, False, False, True]


def test_columns_are_marked_each_in_its_way() -> None:
    rows = [[Cell("1"), Cell("1")], [Cell("2"), Cell("2")]]
    assert [[cell.best for cell in row] for row in marked_columns(rows, [True, False])] == [
        [False, True],
        [True, False],
    ]
    assert marked_columns([[], []]) == [[], []] and marked_columns([]) == [] and transposed([[1, 2]]) == [[1], [2]]


COLUMN = st.lists(st.integers(0, 4) | st.none(), max_size=7)


@given(COLUMN, st.booleans())
def test_a_rank_is_one_more_than_the_number_of_better_ones(column: list[int | None], higher: bool) -> None:
    for value, place in zip(column, ranks(column, higher), strict=True):
        better = [other for other in column if value is not None and other is not None and other != value]
        better = [other for other in better if (other > value) == higher]  # type: ignore[operator]
        assert place == (None if value is None else 1 + len(better))


def test_ranks_of_rows_are_over_the_columns_that_they_have() -> None:
    assert rank([[0.5, 0.2, None], [0.5, 0.3, 0.1], [0.4, None, None]]) == [
        Ranking(1.5, 1),
        Ranking(1.0, 3),
        Ranking(3.0, 0),
    ]
    assert rank([[None], [0.1]]) == [Ranking(None, 0), Ranking(1.0, 1)] and rank([]) == []
    assert rank([[2.0], [1.0]], higher=False) == [Ranking(2.0, 0), Ranking(1.0, 1)]
    assert best_two([0.3, 0.3, None, 0.2]) == (0.3, 0.2) and best_two([2.5, 1.5], higher=False) == (1.5, 2.5)
    assert (half_up(7.625), half_up(4.375)) == (7.63, 4.38)
    with pytest.raises(ValueError, match="rows of one length"):
        rank([[1.0], [1.0, 2.0]])


FULL = Table(
    [
        Column("Model"),
        Column("In-Ctx\nRecall", "recall", scores=True, block="Tasks"),
        Column("Loss ↓", "loss", scores=True, block="Tasks"),
        Column("Size", align="right"),
        Column("Parameters", hidden=True),
    ],
    [
        Group([["FEM_SM", Cell("40.0", "0.1", "2 of 3 seeds", "99.9"), Cell("1.0", mark="best"), "1", "7"]], "Our 5%"),
        Group([["AFT", Cell(paper="63.0"), Cell("2.0", mark="second"), "", "8"]], "Others"),
    ],
    notes=["In parentheses: the paper's.", "100 % sure."],
)


def test_the_markdown_of_a_full_table() -> None:
    assert as_markdown(FULL).splitlines() == [
        "| Model | In-Ctx Recall | Loss ↓ | Size |",
        "| --- | ---: | ---: | ---: |",
        "| **Our 5%** | | | |",
        "| FEM_SM | 40.0 ± 0.1 [2 of 3 seeds] (99.9) | **1.0** | 1 |",
        "| **Others** | | | |",
        "| AFT | – (63.0) | <u>2.0</u> | |",
        "",
        "In parentheses: the paper's.",
        "",
        "100 % sure.",
    ]


def test_the_latex_of_a_full_table() -> None:
    assert as_latex(FULL).splitlines() == [
        "% In parentheses: the paper's.",
        "% 100 % sure.",
        r"\begin{tabular}{lccr}",
        r"\toprule",
        r"\multirow{2}{*}{Model} & \multicolumn{2}{c}{\textbf{Tasks}} & \multirow{2}{*}{Size} \\",
        r"\cmidrule(lr){2-3}",
        r" & \makecell{In-Ctx\\Recall} & Loss $\downarrow$ &  \\",
        r"\midrule",
        r"\multicolumn{4}{l}{\textbf{Our 5\%}} \\",
        r"FEM\_SM & 40.0{\scriptsize$\pm$0.1} {\scriptsize [2 of 3 seeds]} {\scriptsize (99.9)} & \textbf{1.0} & 1 \\",
        r"\midrule",
        r"\multicolumn{4}{l}{\textbf{Others}} \\",
        r"AFT & -- {\scriptsize (63.0)} & \underline{2.0} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    cell = Cell("", "", "1 of 2 jobs", "99.9")
    stacked = Table([Column("a", scores=True)], [Group([[cell], [Cell()], [Cell("1", "2")]])], stacked=True)
    lines = as_latex(stacked).splitlines()
    assert lines[-5] == r"\makecell{\scriptsize [1 of 2 jobs]\\\scriptsize (99.9)} \\"
    assert lines[-4:-2] == [r"\makecell{--} \\", r"\makecell{1{\scriptsize$\pm$2}} \\"]


def test_the_csv_of_a_full_table_has_columns_for_what_stands_beside_numbers() -> None:
    first, second = csv.DictReader(io.StringIO(as_csv(FULL)))
    assert first == {
        "group": "Our 5%", "model": "FEM_SM", "recall": "40.0", "recall_error": "0.1",
        "recall_missing": "2 of 3 seeds", "recall_paper": "99.9", "loss": "1.0", "size": "1", "parameters": "7",
    }  # fmt: skip
    assert (second["recall"], second["recall_paper"], second["parameters"]) == ("", "63.0", "8")


def test_a_melted_csv_has_a_line_per_score() -> None:
    melted = Table(FULL.columns, FULL.groups, melted=("task", "accuracy"))
    lines = [*csv.DictReader(io.StringIO(as_csv(melted)))]
    assert len(lines) == 4
    assert lines[0] == {
        "group": "Our 5%", "model": "FEM_SM", "size": "1", "parameters": "7", "task": "recall", "accuracy": "40.0",
        "standard_error": "0.1", "missing": "2 of 3 seeds", "paper": "99.9",
    }  # fmt: skip


def test_several_tables_are_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    one = Table.of(["layer", "ms"], [["attention", "1.2"], ["FEM", "1.3 [1–2]"]], "First", "A note.")
    two = Table.of(["layer", "bytes"], [], "Second")
    text = as_markdown(one, two)
    assert text.index("First") < text.index("attention") < text.index("A note.") < text.index("Second")
    assert as_latex(one, two).count(r"\begin{tabular}") == as_html(one, two).count("<table>") == 2
    assert [line["ms"] for line in csv.DictReader(io.StringIO(as_csv(one, two)))] == ["1.2", "1.3 [1–2]"]
    assert one.header == ["layer", "ms"] and one.rows[0] == ["attention", "1.2"]
    show(one, FULL)
    drawn = capsys.readouterr().out
    for part in ("First", "1.3 [1–2]", "A note.", "40.0 ± 0.1 [2 of 3 seeds] (99.9)", "Our 5%"):
        assert part in drawn
    assert "Parameters" not in drawn


def test_a_table_without_rows_or_with_one_column_is_written(tmp_path: Path) -> None:
    tables = [Table.of(["a", "b"], []), Table([Column("x")], [Group([["y"]]), Group([])])]
    write(tmp_path / "new", tables, "both", ("md", "tex", "csv", "html"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "both.csv",
        "both.html",
        "both.md",
        "both.tex",
    ]
    assert rendered((tmp_path / "new" / "both.md").read_text())["td"] == ["y"]
    with pytest.raises(ValueError, match="formats='pdf' is not allowed; choose some of md, tex, csv, html"):
        write(tmp_path / "none", tables, formats=("md", "pdf"))
    assert not (tmp_path / "none").exists()


def test_a_table_that_would_lose_something_is_refused() -> None:
    with pytest.raises(ValueError, match=r"columns=\['ratio'\] is not allowed; choose .* a key of its own"):
        Table.of(["layer", "ratio", "ratio"], [])
    with pytest.raises(ValueError, match=r"row=\['a'\] is not allowed; choose 2 cells: layer, ms"):
        Table.of(["layer", "ms"], [["a"]])
    with pytest.raises(ValueError, match="columns="):
        Table([], [])
    with pytest.raises(ValueError, match="key='group' is not allowed"):
        Table.of(["group"], [])


def test_figures_share_their_look(tmp_path: Path) -> None:
    names = [f"m{n}" for n in range(11)]
    found = looks([*names, "rival"], "rival")
    assert found["rival"]["color"] == "black" and found["m0"]["color"] == found["m9"]["color"] == COLOURS[0]
    assert len({look["color"] for look in found.values()}) == len(COLOURS) + 1
    drawing = figure(3, 2)
    axes = drawing.subplots()
    axes.plot([1, 10], [1, 100], **found["m1"])
    axes.set(yscale="log")
    plain_log(axes.yaxis)
    quiet(axes)
    save(drawing, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_the_example_of_the_readme_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(reporting.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert "| FEM-SM | **77.0** ± 1.0 (76.7) | 5,780,000 |" in capsys.readouterr().out
