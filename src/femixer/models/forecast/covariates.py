"""Covariates: columns that are not forecast but tell about what is.

known  K columns whose values are known ahead (calendar, prices, plans): [B, L + horizon, K], the history's rows first
past   P columns that are known up to now only: [B, L, P]

Scaled; NaN is missing and read as 0, the mean of the training rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.models.forecast.config import ForecastConfig


class Covariates(NamedTuple):
    """Of windows of exactly the look-back: known [B, lookback + horizon, K], past [B, lookback, P]; K or P may be 0."""

    known: Tensor
    past: Tensor


def covariates_of(
    config: ForecastConfig, history: Tensor, known: Tensor | None, past: Tensor | None
) -> Covariates | None:
    """Checked against the history [B, L, C] and cut to the look-back as it is; None for a model without any."""
    if not config.known_covariates and not config.past_covariates:
        for name, given in (("known", known), ("past", past)):
            if given is not None:
                raise ValueError(f"{name} has shape {tuple(given.shape)}; this model was made without covariates")
        return None
    batch, length = history.shape[:2]
    horizon = config.horizon
    both = []
    for name, given, columns, ahead in (
        ("known", known, config.known_covariates, horizon),
        ("past", past, config.past_covariates, 0),
    ):
        shape = (batch, length + ahead, len(columns or ()))
        given = history.new_zeros(shape) if given is None and not columns else given
        if given is None or given.shape != shape:
            has = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            raise ValueError(f"{name} {has}; allowed is {shape}: {', '.join(columns or ()) or 'no column'}")
        given = given.masked_fill(given.isnan(), 0)
        missing = config.lookback - length
        both.append(F.pad(given, (0, 0, missing, 0)) if missing > 0 else given[:, -config.lookback - ahead :])
    return Covariates(*both)


def patched(values: Tensor, patches: int, patch: int) -> Tensor:
    """[B, T, K] -> [B, patches, K patch]: patches that end with the last row, the first filled with zeros."""
    rows = F.pad(values.transpose(1, 2), (patches * patch - values.shape[1], 0))
    return torch.movedim(rows.unflatten(-1, (patches, patch)), 1, 2).flatten(2)
