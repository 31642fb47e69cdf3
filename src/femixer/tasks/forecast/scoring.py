"""How far forecasts are from what came: the errors of the protocol, in scaled units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from femixer.tasks.forecast.windows import Windows
from femixer.training import distributed


def score(model: Callable[..., Tensor], windows: Windows, batch: int) -> dict[str, float]:
    """MSE and MAE: the means of (forecast - future)^2 and |forecast - future| over all known values of all windows."""
    sums = torch.zeros(2, dtype=torch.float64)
    known = 0
    mine = torch.arange(windows.count)[distributed.part().rows(windows.count)]
    for numbers in mine.split(batch):
        given = windows.take(numbers)
        error = model(given.history, given.observed) - given.future
        if given.future_observed is not None:
            error = error[given.future_observed]
        known += error.numel()
        sums += torch.stack([error.square().sum(dtype=torch.float64), error.abs().sum(dtype=torch.float64)]).cpu()
    squared, absolute, count = distributed.total(*sums.tolist(), known)
    if count == 0:
        raise ValueError("the rows of a split have no value at all: everything in them is missing")
    return {"mse": squared / count, "mae": absolute / count}
