"""Options of `femixer bench forecast`."""

from __future__ import annotations

from dataclasses import dataclass

from femixer.bench.options import BenchOptions, check_distinct, check_positive
from femixer.models.named import NAMED
from femixer.options import check

RIVAL = "SMAttn"


@dataclass(frozen=True)
class Options(BenchOptions):
    """Forecasters: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are forecast.json and forecast.md.
    """

    batch: int = 32
    """Windows of a step."""
    rounds: int = 15
    """Rounds measured; a round is one step of every model."""
    warmup: int = 3
    """Rounds before that, not counted."""
    channels: int = 7
    """Channels of the series."""
    lookback: int = 1024
    """Rows to forecast from."""
    horizon: int = 96
    """Rows to forecast."""
    windows: int = 7521
    """Windows of an epoch, whose time is worked out from that of a step; ETTh1 has so many at 1024 and 96."""
    models: tuple[str, ...] = ("FEM-SM",)
    """Models by their names in the paper's tables, besides SMAttn, plain attention."""

    def validate(self) -> None:
        super().validate()
        for name in ("channels", "lookback", "horizon", "windows"):
            check_positive(name, getattr(self, name))
        check_distinct("models", self.models)
        others = [name for name in NAMED if name != RIVAL]
        for model in self.models:
            check(model in others, "models", model, f"names among {', '.join(others)}")
