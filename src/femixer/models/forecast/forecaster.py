"""What every forecaster shares: windows in and forecasts out, losses, prediction in the user's own units, files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.damage import reading
from femixer.finite import check_tensor
from femixer.models.forecast import frames
from femixer.models.forecast.config import ForecastConfig
from femixer.models.forecast.window import fitted
from femixer.models.language import FEMPreTrainedModel
from femixer.models.loading import check_kind
from femixer.options import check


class Forecaster(FEMPreTrainedModel):
    """history [B, L, channels] -> forecast [B, horizon, channels], both in the scaled space of training.

    Subclasses define `forecast` on windows of exactly the look-back. `Forecaster.from_pretrained` loads any of them.
    """

    config_class = ForecastConfig  # type: ignore[assignment]
    config: ForecastConfig
    kind: str
    trainable = True
    supports_gradient_checkpointing = False
    _no_split_modules: list[str] = []  # noqa: RUF012
    _can_record_outputs: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        check(config.kind == self.kind, "kind", config.kind, f"{self.kind!r} for {type(self).__name__}, or use build()")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, from safetensors only; on Forecaster itself, a model of the kind that was saved."""
        if cls is not Forecaster:
            return super().from_pretrained(*args, **kwargs)
        from femixer.models.forecast import FORECASTERS

        path = args[0] if args else kwargs["pretrained_model_name_or_path"]
        check_kind(path, cls.config_class.model_type, kwargs)
        with reading(f"{path}: config.json"):
            kind = ForecastConfig.from_pretrained(path).kind
        return FORECASTERS[kind].from_pretrained(*args, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """What AutoModel.from_config calls: on Forecaster itself, a model of the kind that the configuration names."""
        if cls is not Forecaster:
            return super()._from_config(config, **kwargs)
        from femixer.models.forecast import FORECASTERS

        return FORECASTERS[config.kind]._from_config(config, **kwargs)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        """window and observed [B, lookback, C] -> [B, horizon, C]; unobserved places of the window hold 0."""
        raise TypeError(f"{type(self).__name__} must define forecast()")

    def forward(
        self,
        history: Tensor,
        observed: Tensor | None = None,
        future: Tensor | None = None,
        future_observed: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """history [B, L, C]: a longer one than the look-back is cut, a shorter one is unobserved on the left.

        observed bool [B, L, C]: False is a missing value, and what stands there does not matter. With `future`, the
        losses: so that wrappers of the model (DDP, torch.compile) see them computed.
        """
        self._check("history", history, None, observed)
        window, observed = fitted(history, observed, self.config.lookback)
        if future is None:
            return self.forecast(window, observed)
        self._check("future", future, self.config.horizon, future_observed)
        return self.score(window, observed, future, future_observed)

    def losses(
        self,
        history: Tensor,
        future: Tensor,
        observed: Tensor | None = None,
        future_observed: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """For femixer.training.train: sums over windows (so `items` is their number, len(history)) to be minimised
        together, each window's the mean over its observed points. "loss" is the squared error of the forecast; further
        names are losses besides."""
        losses = self.forward(history, observed, future, future_observed)
        assert isinstance(losses, dict)
        return losses

    def score(
        self, window: Tensor, observed: Tensor | None, future: Tensor, future_observed: Tensor | None
    ) -> dict[str, Tensor]:
        """The losses of windows [B, lookback, C] that continue with future [B, horizon, C]."""
        return {"loss": squared_error(self.forecast(window, observed), future, future_observed)}

    @torch.no_grad()
    def predict(self, history: Any) -> Any:
        """The next `horizon` points, in the units of the history.

        history: an array [L, C], [L] for one channel, or [B, L, C], and the forecast is one of the same kind; or a
        pandas DataFrame or Series with a DatetimeIndex or a date column, and the forecast is one with the next time
        stamps. Missing are NaN, what an array masks, rows between two others, and what is at or below missing_below of
        the configuration. The history may be shorter than the look-back; of a longer one the last points are used.
        """
        if frames.is_frame(history):
            return frames.predicted(history, self.config, self.predict)
        if isinstance(history, np.ma.MaskedArray):
            history = np.where(np.ma.getmaskarray(history), np.nan, history.data)
        values = np.asarray(history)
        if values.dtype.kind not in "fiub":
            raise TypeError(f"history has dtype {values.dtype}; allowed are numbers, with NaN for missing ones")
        windows = values[:, None] if values.ndim == 1 else values
        windows = windows if windows.ndim == 3 else windows[None]
        self._check_channels("history", values.shape, windows.ndim == 3 and windows.shape[-1] == self.config.channels)
        check(not np.isinf(windows).any(), "history", "inf", "finite numbers, or NaN for missing ones")
        windows = windows[:, -self.config.lookback :].astype(np.float64)
        if self.config.missing_below is not None:
            windows[windows <= self.config.missing_below] = np.nan
        empty = np.flatnonzero(np.isnan(windows).all((1, 2)))
        where = f"{windows.shape[1]} points" + (f" in window {empty[0]}" if values.ndim == 3 and len(empty) else "")
        check(not len(empty), "history", where, f"at least one of the last {self.config.lookback} that is not missing")
        forecast = self._unscaled(windows)
        if values.ndim < 3:
            forecast = forecast[0]
        if values.ndim < 2:
            forecast = forecast[:, 0]
        return forecast.astype(values.dtype if values.dtype.kind == "f" else np.float64)

    def _unscaled(self, windows: np.ndarray) -> np.ndarray:
        """windows [B, L, C] with NaN for missing -> forecast [B, horizon, C], scaled on the way in and back after."""
        channels = self.config.channels
        mean = np.array(self.config.scaler_mean or [0.0] * channels)
        std = np.array(self.config.scaler_std or [1.0] * channels)
        scaled = torch.from_numpy((windows - mean) / std).to(self.device, self.dtype)
        training = self.training
        self.eval()
        forecast = self.forward(scaled, ~scaled.isnan())
        self.train(training)
        assert isinstance(forecast, Tensor)
        return check_tensor(forecast.double().cpu(), "the forecast").numpy() * std + mean

    def _check(self, name: str, given: Tensor, length: int | None, observed: Tensor | None) -> None:
        if not isinstance(given, Tensor) or not given.is_floating_point():
            raise TypeError(f"{name} is {getattr(given, 'dtype', type(given))}; allowed is a floating-point tensor")
        fits = given.dim() == 3 and given.shape[-1] == self.config.channels
        self._check_channels(name, given.shape, fits)
        if length is not None:
            check(given.shape[1] == length, name, tuple(given.shape), f"the horizon, {length} points")
        if observed is None:
            return
        if not isinstance(observed, Tensor) or observed.dtype != torch.bool or observed.shape != given.shape:
            shape = (getattr(observed, "dtype", type(observed).__name__), tuple(getattr(observed, "shape", ())))
            raise ValueError(f"what was observed of {name} is {shape}; allowed is torch.bool {tuple(given.shape)}")

    def _check_channels(self, name: str, shape: tuple[int, ...], fits: bool) -> None:
        channels = self.config.channels
        if not fits:
            raise ValueError(
                f"{name} has shape {tuple(shape)}; allowed is [..., points, {channels}]: this model was made for "
                f"{channels} channel{'s' * (channels > 1)}, in that order"
            )


def squared_error(forecast: Tensor, target: Tensor, observed: Tensor | None) -> Tensor:
    """Sum over windows of the mean over a window's (observed) points; [B, ...] each. No points count as 0."""
    if observed is None:
        return F.mse_loss(forecast, target, reduction="sum") / max(forecast[:1].numel(), 1)
    error = (forecast - target).masked_fill(~observed, 0).square().flatten(1).sum(1)
    return (error / observed.flatten(1).sum(1).clamp_min(1)).sum()


def start_as_torch(model: nn.Module) -> None:
    """Linear maps as torch starts them, as the published code of the rivals does; femixer's own start N(0, 0.02)."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
