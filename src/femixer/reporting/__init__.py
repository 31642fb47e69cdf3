"""Results as tables: one model of a table, and Markdown, LaTeX, CSV, HTML and the terminal from it.

    tables of cells, means over seeds, differences, ranks, marks  reporting.table
    as_markdown, as_latex, as_csv, as_html, show, write           reporting.writers
    colours, axes                                                 reporting.figures

README.md beside this file says how the tables of the tasks and benchmarks are expressed with it.
"""

from femixer.reporting.table import (
    Cell,
    Column,
    Group,
    Row,
    Score,
    Table,
    difference,
    half_up,
    marked,
    marked_columns,
    mean_of,
    rank,
)
from femixer.reporting.writers import as_csv, as_html, as_latex, as_markdown, show, write

__all__ = [
    "Cell",
    "Column",
    "Group",
    "Row",
    "Score",
    "Table",
    "as_csv",
    "as_html",
    "as_latex",
    "as_markdown",
    "difference",
    "half_up",
    "marked",
    "marked_columns",
    "mean_of",
    "rank",
    "show",
    "write",
]
