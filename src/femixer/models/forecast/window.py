"""Windows of series: cut to the look-back, gaps, and normalisation over what was observed.

Here and in all forecasters: B windows, L points, C channels; `observed` bool, None where everything was.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def fitted(history: Tensor, observed: Tensor | None, lookback: int) -> tuple[Tensor, Tensor | None]:
    """history and observed [B, L, C] as windows [B, lookback, C]: the last points, or unobserved ones on the left.

    What stands at unobserved places is replaced by 0, so that not even NaN reaches a sum.
    """
    missing = lookback - history.shape[1]
    if missing > 0:
        observed = torch.ones_like(history, dtype=torch.bool) if observed is None else observed
        history, observed = F.pad(history, (0, 0, missing, 0)), F.pad(observed, (0, 0, missing, 0))
    history = history[:, -lookback:]
    if observed is None:
        return history, None
    observed = observed[:, -lookback:]
    if not torch.compiler.is_compiling() and bool(observed.all()):
        return history, None
    return history.masked_fill(~observed, 0), observed


def filled(window: Tensor, observed: Tensor | None) -> Tensor:
    """The last observed value carried forward, the first one backward to the start; 0 in a channel without any."""
    if observed is None:
        return window
    index = torch.arange(window.shape[1], device=window.device)[:, None]
    last = index.expand_as(window).masked_fill(~observed, -1).cummax(1).values
    first = observed.long().argmax(1, keepdim=True)
    return window.gather(1, torch.where(last < 0, first, last))


def last_value(window: Tensor, observed: Tensor | None) -> Tensor:
    """[B, 1, C]: the last observed value; 0 in a channel without any."""
    if observed is None:
        return window[:, -1:]
    latest = observed.flip(1).long().argmax(1, keepdim=True)
    return window.gather(1, window.shape[1] - 1 - latest)


class Normalised(NamedTuple):
    """values [B, C, L] = (window - shift) / scale per window and channel; shift and scale [B, C, 1]."""

    values: Tensor
    shift: Tensor
    scale: Tensor

    def undone(self, forecast: Tensor) -> Tensor:
        """forecast [B, C, horizon] in the window's units, as [B, horizon, C]."""
        return torch.addcmul(self.shift, forecast, self.scale).transpose(1, 2)


def normalised_to_recent(window: Tensor, observed: Tensor | None, recent: int) -> Normalised:
    """Shift: mean of the last `recent` points; scale: standard deviation of the window (unbiased) + 1e-8.

    Of observed points only; where none of the recent ones was, the shift is the mean of the window. The values at
    unobserved places are 0.
    """
    values, reference, mean, squares, count = _moments(window, observed)
    scale = (squares / (count - 1).clamp_min(1)).sqrt() + 1e-8
    if observed is None:
        shift = values[..., -recent:].mean(-1, keepdim=True)
        return Normalised((values - shift) / scale, reference + shift, scale)
    seen = observed.transpose(1, 2)
    number = seen[..., -recent:].sum(-1, keepdim=True)
    shift = torch.where(number > 0, values[..., -recent:].sum(-1, keepdim=True) / number.clamp_min(1), mean)
    return Normalised(((values - shift) / scale).masked_fill(~seen, 0), reference + shift, scale)


def normalised(window: Tensor, observed: Tensor | None) -> Normalised:
    """RevIN without its affine map: shift by the mean, scale sqrt(variance + 1e-5), of observed points only.

    The values at unobserved places are those of the `filled` window.
    """
    values, reference, mean, squares, count = _moments(window, observed)
    scale = (squares / count + 1e-5).sqrt()
    if observed is not None:
        values = filled(window, observed).transpose(1, 2) - reference
    return Normalised((values - mean) / scale, reference + mean, scale)


class Moments(NamedTuple):
    """values [B, C, L] relative to the `reference`, 0 where unobserved; mean of the observed ones, the sum of squares
    around it, and how many they are."""

    values: Tensor
    reference: Tensor
    mean: Tensor
    squares: Tensor
    number: Tensor


def _moments(window: Tensor, observed: Tensor | None) -> Moments:
    """Relative to the last value: a constant is exactly 0 then, and a large level does not cost the variance digits."""
    reference = last_value(window, observed).transpose(1, 2)
    values = window.transpose(1, 2) - reference
    if observed is None:
        count = values.new_tensor(float(values.shape[-1]))
        mean = values.mean(-1, keepdim=True)
        return Moments(values, reference, mean, (values - mean).square().sum(-1, keepdim=True), count)
    missing = ~observed.transpose(1, 2)
    count = (~missing).sum(-1, keepdim=True).clamp_min(1)
    values = values.masked_fill(missing, 0)
    mean = values.sum(-1, keepdim=True) / count
    around = (values - mean).masked_fill(missing, 0)
    return Moments(values, reference, mean, around.square().sum(-1, keepdim=True), count)
