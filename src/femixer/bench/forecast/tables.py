"""The table of `femixer bench forecast`, and the targets beside its numbers."""

from __future__ import annotations

from femixer.bench.forecast.options import RIVAL
from femixer.bench.steps import Report, StepCost
from femixer.bench.table import Table, ratio_cell

# The most that FEM-SM may take of plain attention's time, and the size that is meant for.
TARGET = 1.2
SIZE = {"channels": 7, "lookback": 1024, "horizon": 96, "batch": 32, "dtype": "float32", "device": "cpu"}


def table(report: Report, targets: bool) -> Table:
    s, e = report.settings, report.environment
    title = (
        f"Training: look-back {s['lookback']}, horizon {s['horizon']}, {s['channels']} channels, batch {s['batch']}, "
        f"{s['dtype']}, {e['threads']} threads, torch {e['torch']}"
    )
    header = [
        "model",
        "parameters",
        "ms per step",
        f"seconds per {s['windows']:,} windows",
        "ratio to plain attention (smaller is better)",
    ]
    return Table(title, header, [_row(cost, report, targets) for cost in report.training])


def target(cost: StepCost, report: Report) -> float | None:
    """None where there is none."""
    fits = all(report.settings[name] == value for name, value in SIZE.items())
    return TARGET if fits and cost.key == "FEM-SM" else None


def _row(cost: StepCost, report: Report, targets: bool) -> list[str]:
    steps = -(-report.settings["windows"] // report.settings["batch"])
    return [
        cost.name,
        f"{cost.parameters:,}",
        f"{cost.seconds.median * 1e3:.0f}",
        f"{cost.seconds.median * steps:.1f}",
        "1" if cost.key == RIVAL else ratio_cell(cost.ratio, target(cost, report) if targets else None),
    ]
