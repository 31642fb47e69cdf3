"""What every scan returns, and the numbers that stand for nothing in the scans written in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

# Stands for the logarithm of nothing where an infinity would make NaN of a difference.
NOTHING = -1e9
# A total below this is nothing; gradients divide by its square.
TINY = 1e-140


class Reading(NamedTuple):
    """One direction's read [B, T, ...]; the log of its total weight, -inf where nothing is seen (anything at padding),
    of the same shape or without the channels; and the scan's state after the last token."""

    mean: Tensor
    free: Tensor | None
    log_total: Tensor
    state: Any

    def double(self) -> Reading:
        free = None if self.free is None else self.free.double()
        return Reading(self.mean.double(), free, self.log_total.double(), self.state)
