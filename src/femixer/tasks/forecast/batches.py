"""Batches of training windows."""

from __future__ import annotations

from femixer.tasks.forecast.windows import Batch, Windows
from femixer.training import Part
from femixer.training.epochs import Epochs


class Batches:
    """All training windows in an order of each epoch's own, as a function of the step: 1, 2, ..."""

    def __init__(self, windows: Windows, batch: int, seed: int) -> None:
        self.windows = windows
        self.epochs = Epochs(windows.count, batch, seed)
        self.per_epoch = self.epochs.per_epoch

    def __call__(self, step: int, part: Part) -> Batch:
        return self.windows.take(self.epochs(step, part))
