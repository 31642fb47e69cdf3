"""Series to forecast: hours from a date on, and waves that a linear map continues."""

import numpy as np
import pandas as pd

from femixer.tasks.forecast.data import Series


def hourly(rows, start="2016-07-01"):
    return pd.date_range(start, periods=rows, freq="h")


def series(values, name="mine", **fields):
    values = np.asarray(values, dtype=float)
    values = values[:, None] if values.ndim == 1 else values
    return Series(name, hourly(len(values)), values, tuple(f"c{i}" for i in range(values.shape[1])), **fields)


def waves(rows, channels=2, noise=0.0):
    """Sines of 7 and 11 rows, which a linear map of 22 rows continues and no season of a day does."""
    t, draw = np.arange(rows)[:, None], np.random.default_rng(0)
    values = np.sin(2 * np.pi * t / 7 + np.arange(channels)) + 0.5 * np.cos(2 * np.pi * t / 11)
    return 3 + 5 * values + noise * draw.standard_normal((rows, channels))
