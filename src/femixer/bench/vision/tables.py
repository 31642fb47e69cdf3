"""The table of `femixer bench vision`, and the target beside its ratios."""

from __future__ import annotations

from femixer.bench.mixers import ATTENTION, canonical
from femixer.bench.steps import Report, StepCost
from femixer.bench.table import Table, ratio_cell

# The most that FEM with the softmax prior may take of plain attention's time, and the size that is meant for.
TARGET = 1.15
SIZE = {"preset": "deit-tiny", "batch": 8, "parts": "CLTG", "positions": "learned", "dtype": "float32", "device": "cpu"}
PIXELS = 224


def table(report: Report, targets: bool) -> Table:
    s, e = report.settings, report.environment
    mode = "compiled" if s["compile"] else "eager"
    title = (
        f"Training, {mode}: {s['preset']}, {s['image_size']} x {s['image_size']} pixels, batch {s['batch']}, "
        f"{s['positions']} positions, {s['dtype']}, {e['threads']} threads, torch {e['torch']}"
    )
    header = ["model", "parameters", "ms per step", "images per second", "ratio to plain attention (smaller is better)"]
    return Table(title, header, [_row(cost, report, targets) for cost in report.training])


def target(cost: StepCost, report: Report) -> float | None:
    """None where there is none."""
    fits = all(report.settings[name] == value for name, value in SIZE.items())
    if not fits or report.settings["image_size"] != PIXELS:
        return None
    return TARGET if cost.key != ATTENTION and canonical(cost.key) == "softmax" else None


def _row(cost: StepCost, report: Report, targets: bool) -> list[str]:
    limit = target(cost, report) if targets else None
    return [
        cost.name,
        f"{cost.parameters:,}",
        f"{cost.seconds.median * 1e3:.0f}",
        f"{report.settings['batch'] / cost.seconds.median:.1f}",
        "1" if cost.key == ATTENTION else ratio_cell(cost.ratio, limit),
    ]
