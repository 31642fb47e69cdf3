"""Tables as Markdown, LaTeX, CSV and HTML, text that they show as it is, and what the terminal shows."""

from __future__ import annotations

import csv
import html
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from femixer.optional import require
from femixer.options import check
from femixer.reporting.table import PLACES, Cell, Column, Row, Table, number
from femixer.training import atomic


def one_line(text: str) -> str:
    """Line breaks, tabs and other control characters as single spaces."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())


_INLINE = re.compile(
    r"""[\\`*|~$]                    # always of meaning
      | (?<![^\W_])_ | _(?![^\W_])   # an underscore inside a word is none
      | <(?=[A-Za-z/!?])             # would open a tag
      | &(?=\#|[A-Za-z])             # would be a character
      | (?<=\])[(\[:] | (?<=!)\[     # would make a link, an image or a definition
    """,
    re.VERBOSE,
)


def in_markdown(text: str) -> str:
    """Inside a cell or a sentence."""
    return _INLINE.sub(r"\\\g<0>", one_line(text))


def paragraph(text: str) -> str:
    """A Markdown paragraph of its own: not a heading, a list, a quote, a line or a definition."""
    inline = in_markdown(text)
    numbered = re.match(r"\d+(?=[.)])", inline)
    if numbered:
        return f"{numbered[0]}\\{inline[numbered.end() :]}"
    return f"\\{inline}" if inline[:1] in {*"#+-=>"} else inline


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX |= {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # After a line break of a table these two would belong to it.
    "[": "{[}",
    "*": "{*}",
}
_LATEX |= {"–": "--", "—": "---", "…": r"\ldots{}"}
_SIGNS = {"±": "pm", "≤": "le", "≥": "ge", "×": "times", "µ": "mu", "μ": "mu", "↑": "uparrow", "↓": "downarrow"}
_LATEX |= {sign: rf"$\{name}$" for sign, name in _SIGNS.items()}


def in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in one_line(text))


def in_html(text: str) -> str:
    return html.escape(one_line(text))


_FORMULA = {*"=+-@", *"\uff1d\uff0b\uff0d\uff20"}  # also as wide characters, which some spreadsheets take for these


def in_csv(text: str) -> str:
    """A spreadsheet would run text that begins like a formula; an apostrophe in front makes it text."""
    line = one_line(text)
    return f"'{line}" if line[:1] in _FORMULA and number(line) is None else line


def as_markdown(*tables: Table) -> str:
    """Pipe tables, each with its title above and its notes below."""
    blocks = []
    for table in tables:
        shown = _shown(table)
        lines = [[in_markdown(column.title) for column in shown], ["---:" if c.right else "---" for c in shown]]
        marks = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
        for group in table.groups:
            if group.title:
                lines.append([f"**{in_markdown(group.title)}**", *[""] * (len(shown) - 1)])
            cells = (_cells(table, row) for row in group.rows)
            lines += [[beside(cell, in_markdown, marks, table.empty) for cell in row] for row in cells]
        blocks.append(paragraph(table.title))
        blocks.append("\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines))
        blocks += map(paragraph, table.notes)
    return "\n\n".join(filter(None, blocks)) + "\n"


def beside(cell: Cell | str, escape: Callable[[str], str], marks: Mapping[str, str], empty: str) -> str:
    """A cell on one line: value ± error [missing] (paper)."""
    if isinstance(cell, str):
        return escape(cell)
    value = escape(cell.value)
    parts = [
        value and marks[cell.mark].format(value),
        cell.error and f"± {escape(cell.error)}",
        cell.missing and f"[{escape(cell.missing)}]",
    ]
    ours = " ".join(filter(None, parts)) or empty
    return " ".join(filter(None, [ours, cell.paper and f"({escape(cell.paper)})"]))


def as_latex(*tables: Table) -> str:
    """A tabular of booktabs for each table; with makecell and multirow where it is stacked or has blocks."""
    return "\n".join("\n".join([*_latex_lines(table), ""]) for table in tables)


def _latex_lines(table: Table) -> Iterator[str]:
    shown = _shown(table)
    yield from (f"% {one_line(text)}" for text in (table.title, *table.notes) if text)
    yield rf"\begin{{tabular}}{{{''.join('c' if c.scores else 'r' if c.right else 'l' for c in shown)}}}"
    yield r"\toprule"
    if any(column.block for column in shown):
        yield from _latex_blocks(shown)
    else:
        yield rf"{' & '.join(_latex_title(column) for column in shown)} \\"
    for group in table.groups:
        yield r"\midrule"
        if group.title:
            yield rf"\multicolumn{{{len(shown)}}}{{l}}{{\textbf{{{in_latex(group.title)}}}}} \\"
        for row in group.rows:
            yield rf"{' & '.join(_latex_cell(cell, table.stacked) for cell in _cells(table, row))} \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_title(column: Column) -> str:
    lines = [in_latex(line) for line in column.title.split("\n")]
    return lines[0] if len(lines) == 1 else _stacked(lines)


def _latex_blocks(shown: Sequence[Column]) -> Iterator[str]:
    """Two lines of titles: the blocks, each with a rule below it, and their columns."""
    upper, rules, at = [], [], 1
    for block, members in groupby(shown, lambda column: column.block):
        columns = [*members]
        if block:
            upper.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{\textbf{{{in_latex(block)}}}}}")
            rules.append(rf"\cmidrule(lr){{{at}-{at + len(columns) - 1}}}")
        else:
            upper += [rf"\multirow{{2}}{{*}}{{{_latex_title(column)}}}" for column in columns]
        at += len(columns)
    yield rf"{' & '.join(upper)} \\"
    yield "".join(rules)
    yield rf"{' & '.join(_latex_title(column) if column.block else '' for column in shown)} \\"


def _latex_cell(cell: Cell | str, stacked: bool) -> str:
    if isinstance(cell, str):
        return in_latex(cell)
    value = in_latex(cell.value)
    value = value and {"": value, "best": rf"\textbf{{{value}}}", "second": rf"\underline{{{value}}}"}[cell.mark]
    first = value + (rf"{{\scriptsize$\pm${in_latex(cell.error)}}}" if cell.error else "")
    small = [cell.missing and f"[{in_latex(cell.missing)}]", cell.paper and f"({in_latex(cell.paper)})"]
    first = first or ("" if cell.missing else "--")
    if stacked:
        return _stacked([first, *(text and rf"\scriptsize {text}" for text in small)])
    return " ".join(filter(None, [first, *(text and rf"{{\scriptsize {text}}}" for text in small)]))


def _stacked(lines: Sequence[str]) -> str:
    return r"\makecell{" + r"\\".join(filter(None, lines)) + "}"


def as_html(*tables: Table) -> str:
    """A fragment without styles of its own, but for the side that numbers stand on."""
    return "\n".join("\n".join([*_html_lines(table), ""]) for table in tables)


def _html_lines(table: Table) -> Iterator[str]:
    shown = _shown(table)
    yield "<table>"
    if table.title:
        yield f"<caption>{in_html(table.title)}</caption>"
    yield "<thead>"
    if any(column.block for column in shown):
        spans = [(block, len([*same])) for block, same in groupby(shown, lambda column: column.block)]
        yield "<tr>" + "".join(f'<th colspan="{n}">{in_html(block)}</th>' for block, n in spans) + "</tr>"
    titles = ("<br>".join(map(in_html, column.title.split("\n"))) for column in shown)
    yield "<tr>" + "".join(f'<th scope="col">{title}</th>' for title in titles) + "</tr>"
    yield "</thead>"
    for group in table.groups:
        yield "<tbody>"
        if group.title:
            yield f'<tr><th colspan="{len(shown)}" scope="rowgroup">{in_html(group.title)}</th></tr>'
        for row in group.rows:
            cells = zip(shown, _cells(table, row), strict=True)
            yield "<tr>" + "".join(_html_cell(column, cell, table.empty) for column, cell in cells) + "</tr>"
        yield "</tbody>"
    yield "</table>"
    yield from (f"<p>{in_html(note)}</p>" for note in table.notes)


def _html_cell(column: Column, cell: Cell | str, empty: str) -> str:
    marks = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}
    text = beside(cell, in_html, marks, in_html(empty))
    return f'<td style="text-align: right">{text}</td>' if column.right else f"<td>{text}</td>"


def as_csv(*tables: Table) -> str:
    """A line per row, or per score of a melted table; titles of tables and groups are columns where there are any."""
    records = [record for table in tables for record in _records(table)]
    names = [*dict.fromkeys(name for record in records for name in record)]
    kept = [name for name in names if name not in PLACES or any(record.get(name) for record in records)]
    file = io.StringIO()
    writer = csv.DictWriter(file, kept, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerow({name: in_csv(name) for name in kept})
    writer.writerows({name: in_csv(text) for name, text in record.items()} for record in records)
    return file.getvalue()


def _records(table: Table) -> Iterator[dict[str, str]]:
    for group in table.groups:
        for row in group.rows:
            place = dict(zip(PLACES, (table.title, group.title), strict=True))
            yield from _melted(table, row, place) if table.melted else [_wide(table, row, place)]


def _wide(table: Table, row: Row, record: dict[str, str]) -> dict[str, str]:
    """What stands beside a number has columns of its own, where any row has it."""
    for place, (column, cell) in enumerate(zip(table.columns, row, strict=True)):
        if isinstance(cell, str):
            record[column.name] = cell
            continue
        record[column.name] = cell.value
        for what in ("error", "missing", "paper"):
            if any(isinstance(r[place], Cell) and getattr(r[place], what) for r in table.rows):
                record[f"{column.name}_{what}"] = getattr(cell, what)
    return record


def _melted(table: Table, row: Row, place: Mapping[str, str]) -> Iterator[dict[str, str]]:
    assert table.melted is not None
    which, value = table.melted
    pairs = [*zip(table.columns, row, strict=True)]
    names = {column.name: cell for column, cell in pairs if not column.scores and isinstance(cell, str)}
    for column, cell in pairs:
        if column.scores and isinstance(cell, Cell):
            numbers = {value: cell.value, "standard_error": cell.error, "missing": cell.missing, "paper": cell.paper}
            yield {**place, **names, which: column.name, **numbers}


def _shown(table: Table) -> list[Column]:
    return [column for column in table.columns if not column.hidden]


def _cells(table: Table, row: Row) -> list[Cell | str]:
    return [cell for column, cell in zip(table.columns, row, strict=True) if not column.hidden]


WRITERS: Mapping[str, Callable[..., str]] = {"md": as_markdown, "tex": as_latex, "csv": as_csv, "html": as_html}
"""By the ending of the file."""


def write(
    folder: Path, tables: Sequence[Table], name: str = "table", formats: Sequence[str] = ("md", "tex", "csv")
) -> None:
    """NAME.md, NAME.tex, ... in a folder, which is made."""
    for ending in formats:
        check(ending in WRITERS, "formats", ending, f"some of {', '.join(WRITERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for ending in formats:
        atomic.write(folder / f"{name}.{ending}", WRITERS[ending](*tables))


# Where there is no terminal there is no width to keep to.
WIDTH_OF_A_FILE = 200


def show(*tables: Table) -> None:
    """Draw tables on standard output."""
    rich = require("rich.table", "cli")
    console = require("rich.console", "cli").Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    for table in tables:
        notes = "\n".join(table.notes)
        around = {"title": _text(table.title), "caption": _text(notes) if notes else None}
        drawn = rich.Table(**around, title_justify="left", caption_justify="left")
        for column in _shown(table):
            drawn.add_column(_text(column.title), justify="right" if column.right else "left")
        for group in table.groups:
            if group.title:
                drawn.add_section()
                drawn.add_row(_text(group.title, "bold"))
            for row in group.rows:
                drawn.add_row(*(_drawn(cell, table.empty) for cell in _cells(table, row)))
        console.print(drawn)


def _drawn(cell: Cell | str, empty: str) -> Any:
    styles = {"": "", "best": "bold", "second": "underline"}
    return _text(
        beside(cell, str, dict.fromkeys(styles, "{}"), empty), "" if isinstance(cell, str) else styles[cell.mark]
    )


def _text(text: str, style: str = "") -> Any:
    """As it is: brackets in it are not markup."""
    return require("rich.text", "cli").Text(text, style)
