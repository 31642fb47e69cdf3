"""What is known of data sets by name: their splits, which values mean missing, what their dates do not say."""

from __future__ import annotations

from dataclasses import dataclass

LOOKBACKS = {96: 1024, 192: 2048, 336: 2048, 720: 4096}
"""Of the protocol, by horizon."""
RATIOS = (0.7, 0.2)
"""Shares of the training and of the test rows, both rounded down; validation is what lies between."""


@dataclass(frozen=True)
class Known:
    """A data set of the literature."""

    borders: tuple[int, int, int] | None = None
    """Rows where training, validation and test end; None: by RATIOS."""
    missing_below: float | None = None
    """Values at or below mean missing."""
    also: str = ""
    """Another name under which the file is found."""
    working_days: bool = False
    """Rows are working days, whatever their dates say."""
    bare: tuple[str, str] | None = None
    """Of a file of numbers alone, without a header and dates: the first date, and the step."""


ETTH = (8640, 11520, 14400)
"""12, 4 and 4 months of 30 days, hourly; rows after them are not used."""
ETTM = (34560, 46080, 57600)
"""The same in quarters of an hour."""

KNOWN: dict[str, Known] = {
    "ETTh1": Known(ETTH),
    "ETTh2": Known(ETTH),
    "ETTm1": Known(ETTM),
    "ETTm2": Known(ETTM),
    "weather": Known(missing_below=-9000.0),
    "solar": Known(also="solar_AL", bare=("2006-01-01", "10min")),
    "electricity": Known(),
    "traffic": Known(),
    "exchange": Known(also="exchange_rate", working_days=True),
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
