"""What is known of data sets by name: where their splits are, how long a season is, which values mean missing."""

from __future__ import annotations

from dataclasses import dataclass

LOOKBACKS = {96: 1024, 192: 2048, 336: 2048, 720: 4096}
"""Of the protocol, by horizon."""
RATIOS = (0.7, 0.2)
"""Shares of the training and of the test rows, both rounded down; validation is what lies between."""


@dataclass(frozen=True)
class Known:
    """A data set of the literature."""

    season: int
    """Rows of a day, or of a working week."""
    borders: tuple[int, int, int] | None = None
    """Rows where training, validation and test end; None: by RATIOS."""
    missing_below: float | None = None
    """Values at or below mean missing."""
    also: str = ""
    """Another name under which the file is found."""


ETTH = (8640, 11520, 14400)
"""12, 4 and 4 months of 30 days, hourly; rows after them are not used."""
ETTM = (34560, 46080, 57600)
"""The same in quarters of an hour."""

KNOWN: dict[str, Known] = {
    "ETTh1": Known(24, ETTH),
    "ETTh2": Known(24, ETTH),
    "ETTm1": Known(96, ETTM),
    "ETTm2": Known(96, ETTM),
    "weather": Known(144, missing_below=-9000.0),
    "solar": Known(144, also="solar_AL"),
    "electricity": Known(24),
    "traffic": Known(24),
    "exchange": Known(5, also="exchange_rate"),
}
PACKAGED = "seattle-temps"
"""A real series that vega_datasets installs: temperatures of Seattle in 2010, hourly, 8,759 points (one hour is missing
where summer time begins)."""


def known_name(stem: str) -> str:
    """The name of the data set in a file of this name without its ending: a known one as we write it, or as it is."""
    names = {name.lower(): name for name in KNOWN} | {known.also.lower(): name for name, known in KNOWN.items()}
    return names.get(stem.lower(), stem)


def default_lookback(horizon: int) -> int:
    """The protocol's; for other horizons that of the next longer one."""
    return next((length for longest, length in LOOKBACKS.items() if horizon <= longest), max(LOOKBACKS.values()))
