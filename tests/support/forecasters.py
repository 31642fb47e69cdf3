"""Small forecasters and windows for tests of their models and predictions; series: hours from a date on, and waves that
a linear map continues."""

import numpy as np
import pandas as pd
import torch

from femixer.models.forecast import ForecastConfig, Forecaster, build
from femixer.tasks.forecast.data import Series

CHANNELS, LOOKBACK, HORIZON = 3, 41, 7  # 6 patches, the first with a zero and 6 points
SIZES = {
    "fem": {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2},
    "itransformer": {"hidden_size": 24, "num_attention_heads": 3},
    "seasonal-naive": {"season": 5},
    "ets": {"season": 5},
}
MIXERS = {
    "fem": {},
    "attention": {"mixer": "attention"},
    "gla": {"prior": "gla"},
    "aft": {"prior": "aft"},
    "mamba": {"prior": "mamba"},
}


def make(kind: str = "fem", **fields: object) -> Forecaster:
    """A model whose parameters are all away from their starting values, as after training."""
    torch.manual_seed(0)
    sizes = {"channels": CHANNELS, "lookback": LOOKBACK, "horizon": HORIZON, **SIZES.get(kind, {})}
    model = build(ForecastConfig(kind=kind, **{**sizes, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer += 0.3 * torch.rand_like(buffer)
    return model.eval()


def walks(batch: int = 5, length: int = LOOKBACK, seed: int = 1, channels: int = CHANNELS) -> torch.Tensor:
    return torch.randn(batch, length, channels, generator=torch.Generator().manual_seed(seed)).cumsum(1)


def gaps(shape: tuple[int, ...], seed: int = 2) -> torch.Tensor:
    """What was observed: scattered points are missing, whole stretches, a channel of one window, another's end."""
    observed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3
    observed[0, :17] = False
    observed[1, -9:, 0] = False
    observed[2, :, 1] = False
    observed[3, 10:-1] = False
    return observed


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
