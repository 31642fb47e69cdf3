"""Whether records may stand in one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence

from femixer.training.results import Record


def same(records: Sequence[Record], what: str, value: Callable[[Record], Hashable], *within: str) -> None:
    """An error unless records that agree in the fields `within` have the same value."""
    held: dict[str, Record] = {}
    for record in records:
        first = held.setdefault(described(record, within), record)
        if value(first) != value(record):
            where = f" ({described(record, within)})" if within else ""
            raise ValueError(
                f"results mix different {what}{where}: {value(first)} and {value(record)}; "
                "choose --results that can be compared"
            )


def described(record: Record, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {json.dumps(record[name], sort_keys=True)}" for name in names)
