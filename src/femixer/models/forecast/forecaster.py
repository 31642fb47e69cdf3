"""A forecaster: its configuration, with the scale and the names of the series that it was trained on, and what all of
them share: windows in and forecasts out, losses, prediction in the user's own units, files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from femixer.damage import check_tensor, reading
from femixer.models.config import FEMConfig, MixerConfig, Size, check_values, one_of
from femixer.models.files import check_kind
from femixer.models.forecast import frames
from femixer.models.forecast.window import (
    BATCH,
    NONE,
    Covariates,
    Kind,
    Prediction,
    Window,
    chosen_kind,
    covariates_of,
    fitted,
    pair,
    scaled_covariates,
    scales,
    stacked,
)
from femixer.models.language import FEMPreTrainedModel
from femixer.options import BelowOne, check

KINDS = ("fem", "dlinear", "nlinear", "patchtst", "itransformer", "last-value", "seasonal-naive", "ets")
# Up to as many channels a data set counts as small: PatchTST and iTransformer were published with a small setting for
# such (ETT has 7, the next larger, Weather, 21).
FEW_CHANNELS = 8


# The sizes of a forecaster with layers.
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "dropout")


@strict
class ForecastConfig(MixerConfig):
    """Sizes of a forecaster, its mixer and what is needed to read and write series in the user's own units.

    Sizes that are None are filled in by kind, as published:

        fem           3 layers, 8 heads, width 32 int(sqrt(channels)) and at least 32, MLP 4 x width, dropout 0.1
        patchtst      3 layers; 4 heads, width 16, MLP 128, dropout 0.3 for few channels (published for ETTh), else
                      16 heads, width 128, MLP 256, dropout 0.2
        itransformer  8 heads, dropout 0.1; 2 layers, width and MLP 256 for few channels, else 3 layers, 512

    The fields of MixerConfig are read by kind="fem" only.

    Attributes:
        kind: "fem", "dlinear", "nlinear", "patchtst", "itransformer", "last-value", "seasonal-naive" or "ets".
        channels: Number of series that are forecast together.
        lookback: Points of a window.
        horizon: Points of a forecast.
        hidden_size: Width of the tokens.
        num_hidden_layers: Number of layers.
        num_attention_heads: Heads of every layer.
        intermediate_size: Width of the MLPs.
        dropout: Of both branches of a layer.
        rope: As in FEMConfig, for kind="fem".
        season: Points after which kind="seasonal-naive" repeats.
        scaler_mean: Of the training rows, per channel; the model works on (x - mean) / std, and `predict` converts.
        scaler_std: Likewise.
        frequency: Of the training data, as pandas names it, such as "h".
        columns: Names of the channels.
        date_column: Name of the column of dates.
        date_format: Format of its texts.
        missing_below: Values at or below it are missing, in training and in `predict`.
        known_covariates: Names of columns known ahead (`window.py`), for kind="fem".
        past_covariates: Names of columns known up to now, for kind="fem".
        covariate_mean: Of the known and then the past covariates.
        covariate_std: Likewise.
        quantiles: To forecast besides the mean, ascending, for kind="fem".
        conformal_levels: In percent, those for which the model has widths (`window.py`).
        id_column: Name of the column of series, for a model of many series (long frames).
        series_scale: Name of a series -> its mean and std.
        label: Name of the forecast's column in long frames.
    """

    model_type = "fem-forecaster"

    kind: Annotated[str, one_of(*KINDS)] = "fem"
    channels: Size = 1
    lookback: Size = 336
    horizon: Size = 96
    hidden_size: Size | None = None
    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    intermediate_size: Size | None = None
    dropout: BelowOne | None = None
    rope: bool | None = None
    season: Size = 24
    scaler_mean: list[float] | None = None
    scaler_std: list[float] | None = None
    frequency: str | None = None
    columns: list[str] | None = None
    date_column: str | None = None
    date_format: str | None = None
    missing_below: float | None = None
    known_covariates: list[str] | None = None
    past_covariates: list[str] | None = None
    covariate_mean: list[float] | None = None
    covariate_std: list[float] | None = None
    quantiles: list[float] | None = None
    conformal_levels: list[float] | None = None
    id_column: str | None = None
    series_scale: dict[str, list[float]] | None = None
    label: str | None = None

    def _usual(self) -> dict[str, Any]:
        """Sizes of kinds that have layers, as published, with this number of heads and width if they are given."""
        few, heads, width = self.channels <= FEW_CHANNELS, self.num_attention_heads, self.hidden_size
        sizes: tuple[float, ...] = ()
        if self.kind == "fem":
            heads = heads or 8
            # An even number of channels per head, which rotary positions need.
            width = width or 2 * heads * -(-32 * max(1, math.isqrt(max(self.channels, 1))) // (2 * heads))
            sizes = (3, heads, width, 4 * width, 0.1)
        elif self.kind == "patchtst":
            sizes = (3, 4, 16, 128, 0.3) if few else (3, 16, 128, 256, 0.2)
        elif self.kind == "itransformer":
            width = width or (256 if few else 512)
            sizes = (2 if few else 3, 8, width, width, 0.1)
        return dict(zip(SIZES, sizes, strict=False))

    def validate_architecture(self) -> None:
        """Called by transformers after a change: the model must be possible."""
        check_values(self)
        if self.hidden_size is not None and self.num_attention_heads is not None:
            multiple = f"a multiple of num_attention_heads={self.num_attention_heads}"
            check(self.hidden_size % self.num_attention_heads == 0, "hidden_size", self.hidden_size, multiple)
        for name in ("scaler_mean", "scaler_std", "columns"):
            given = getattr(self, name)
            check(given is None or len(given) == self.channels, name, given, f"one per channel, {self.channels}")
        for std in self.scaler_std or ():
            check(std > 0, "scaler_std", std, "numbers above 0 (1 for a constant channel)")
        only = f"None: kind={self.kind!r} takes none, models of a mixer's layers (FEM-SM, SMAttn, ...) do"
        for name in ("known_covariates", "past_covariates", "quantiles"):
            given = getattr(self, name)
            check(self.kind == "fem" or not given, name, given, only)
        names = self.covariates
        fits = len({*names}) == len(names) and not {*names} & {*(self.columns or ())}
        check(fits, "covariates", names, f"different ones, and none of the columns that are forecast, {self.columns}")
        for name in ("covariate_mean", "covariate_std"):
            given = getattr(self, name)
            check(given is None or len(given) == len(names), name, given, f"one per covariate, {len(names)}")
        given = self.quantiles or []
        ascending = all(low < high for low, high in zip([0.0, *given], [*given, 1.0], strict=True))
        check(ascending, "quantiles", given, "ascending numbers between 0 and 1, as 0.1 0.5 0.9")
        for level in self.conformal_levels or ():
            check(0 < level < 100, "conformal_levels", level, "percent between 0 and 100")
        if self.kind == "fem":
            self.stack()

    @property
    def covariates(self) -> list[str]:
        """Names of the known and then of the past ones."""
        return [*(self.known_covariates or ()), *(self.past_covariates or ())]

    def sizes(self) -> tuple[Any, ...]:
        """Of a kind that has layers: what SIZES names."""
        return tuple(getattr(self, name) for name in SIZES)

    def stack(self) -> FEMConfig:
        """The layers of kind="fem" as a configuration from which their mixers are built."""
        return self._layers(rope=self.rope, mixer_bias=True)


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
    conformal_widths: Tensor

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        check(config.kind == self.kind, "kind", config.kind, f"{self.kind!r} for {type(self).__name__}, or use build()")
        if config.conformal_levels:
            shape = (len(config.conformal_levels), config.horizon, config.channels)
            self.register_buffer("conformal_widths", torch.full(shape, NONE))

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

    def forecast_quantiles(
        self, window: Tensor, observed: Tensor | None, covariates: Covariates | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `forecast`, and besides [B, horizon, C, Q], ascending: of models that were made with quantiles."""
        raise ValueError(f"quantiles={self.config.quantiles} are not forecast by {type(self).__name__}")

    def forward(
        self,
        history: Tensor,
        observed: Tensor | None = None,
        future: Tensor | None = None,
        future_observed: Tensor | None = None,
        known: Tensor | None = None,
        past: Tensor | None = None,
        quantiles: bool = False,
    ) -> Any:
        """history [B, L, C]: one longer than the look-back is cut, a shorter one is unobserved on the left.

        observed bool [B, L, C]: False is a missing value, whose entry does not matter. known [B, L + horizon,
        K] and past [B, L, P]: covariates, if the model has some. With quantiles=True the forecast and its
        quantiles [B, horizon, C, Q].

        With `future`, the losses by name, to be minimised together: sums over windows, each window's the mean over its
        observed points. "loss" is the squared error of the forecast.
        """
        self._check("history", history, None, observed)
        found = covariates_of(self.config, history, known, past)
        # Only models that take covariates have an argument for them.
        extra: tuple[Any, ...] = () if found is None else (found,)
        window, observed = fitted(history, observed, self.config.lookback)
        if future is not None:
            self._check("future", future, self.config.horizon, future_observed)
            return self.score(window, observed, future, future_observed, *extra)
        return (self.forecast_quantiles if quantiles else self.forecast)(window, observed, *extra)

    def score(
        self, window: Tensor, observed: Tensor | None, future: Tensor, future_observed: Tensor | None
    ) -> dict[str, Tensor]:
        """The losses of windows [B, lookback, C] that continue with future [B, horizon, C]."""
        return {"loss": squared_error(self.forecast(window, observed), future, future_observed)}

    def estimate(self, rows: Sequence[np.ndarray]) -> None:
        """Before any training: what a model takes from the scaled training rows [T, C] as they are, of each series of
        several, NaN where missing. Most take nothing."""

    def calibrate(self, levels: Sequence[float], widths: Tensor) -> None:
        """Keep the conformal widths [levels, horizon, C] of `intervals.conformal_widths`, in scaled units."""
        self.config.conformal_levels = [float(level) for level in levels]
        self.register_buffer("conformal_widths", widths.to(self.device, torch.float32))

    def predict(self, history: Any, future: Any = None, levels: Sequence[float] = (), intervals: Kind = "auto") -> Any:
        """The next `horizon` points, in the units of the history.

        history: an array [L, C], [L] for one channel, or [B, L, C]; the forecast is of the same kind. Or a pandas
        DataFrame or Series with a DatetimeIndex or a date column; the forecast has the next time stamps. Or many series
        in one frame (unique_id, ds, y), if the model was trained on such. Missing values are NaN, masked entries of an
        array, absent rows between two others, and values at or below the configuration's missing_below. The history
        may be shorter than the look-back; of a longer one the last points are used.

        future: a frame with the known covariates of the time stamps to forecast, if the model has some (the history
        then has the columns of all covariates). levels: prediction intervals, in percent: frames get columns
        NAME-lo-80 and NAME-hi-80, arrays become a `Prediction`. intervals: how ("quantiles", "conformal").
        """
        how = chosen_kind(self.config, levels, intervals) if levels else "conformal"

        def predict(windows: Sequence[Window]) -> list[Prediction]:
            parts = (windows[first : first + BATCH] for first in range(0, len(windows), BATCH))
            return [each for part in parts for each in self._predicted(part, levels, how)]

        if frames.is_frame(history):
            return frames.predicted(history, self.config, predict, future, levels)
        check(future is None, "future", type(future).__name__, "None for arrays, which have no time stamps")
        names = self.config.covariates
        check(not names, "history", type(history).__name__, f"a frame with the covariates {', '.join(names)}")
        if isinstance(history, np.ma.MaskedArray):
            history = np.where(np.ma.getmaskarray(history), np.nan, history.data)
        values = np.asarray(history)
        if values.dtype.kind not in "fiub":
            raise TypeError(f"history has dtype {values.dtype}; allowed are numbers, with NaN for missing ones")
        windows = values[:, None] if values.ndim == 1 else values  # [B, L, C]
        windows = windows if windows.ndim == 3 else windows[None]
        self._check_channels("history", values.shape, windows.ndim == 3 and windows.shape[-1] == self.config.channels)
        found = predict([Window(window) for window in windows])
        none = np.empty((0, self.config.horizon, self.config.channels))
        together = [None if x[0] is None else np.stack(x, -3) for x in zip(*found, strict=True)] or [none]
        kind = values.dtype if values.dtype.kind == "f" else np.float64
        whole = slice(None)
        like_given: Any = {1: (..., 0, whole, 0), 2: (..., 0, whole, whole), 3: (...,)}[values.ndim]
        shaped: list[Any] = [None if x is None else x.astype(kind)[like_given] for x in together]
        result = Prediction(*shaped)
        return result if levels else result.forecast

    @torch.no_grad()
    def _predicted(self, windows: Sequence[Window], levels: Sequence[float], how: str) -> list[Prediction]:
        """Scaled on the way in and back after; windows have the user's units, and NaN for what is missing."""
        values = stacked(windows, self.config)
        mean, std = scales(windows, self.config)
        known, past = scaled_covariates(windows, self.config)
        given = {
            name: torch.from_numpy(x).to(self.device, self.dtype)
            for name, x in (("history", (values - mean) / std), ("known", known), ("past", past))
            if x is not None
        }
        training = self.training
        self.eval()
        found = self.forward(**given, observed=~given["history"].isnan(), quantiles=bool(levels) and how == "quantiles")
        self.train(training)
        point, quantiles = found if isinstance(found, tuple) else (found, None)
        forecast = check_tensor(point.double().cpu(), "the forecast").numpy() * std + mean
        if not levels:
            return [Prediction(each) for each in forecast]
        if quantiles is not None:
            has = [round(q, 6) for q in self.config.quantiles or ()]
            ends = [[has.index(end) for end in pair(level)] for level in levels]
            spread = quantiles.double().cpu().numpy()
            lower, upper = (np.stack([spread[..., e[side]] * std + mean for e in ends]) for side in (0, 1))
        else:
            places = [(self.config.conformal_levels or []).index(level) for level in levels]
            widths = self.conformal_widths.double().cpu().numpy()[places][:, None]
            widths = np.where(widths < 0, np.inf, widths) * std
            lower, upper = forecast - widths, forecast + widths
        return [Prediction(forecast[i], lower[:, i], upper[:, i]) for i in range(len(forecast))]

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


OUTCOMES = 2**16


class Dropout(nn.Dropout):
    """For many small tensors on a CPU, where drawing the mask costs more than a matrix product.

    x * keep / P(keep), as torch's: on a CPU with 16 random bits per number, p being a multiple of 2^-16.

    torch calls its generator once per number there, which takes twice as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        dropped = min(round(self.p * OUTCOMES), OUTCOMES - 1)
        if not self.training or dropped == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        outcome = bits.view(torch.int16)[: x.numel()].view(x.shape)
        keep = (outcome >= dropped - OUTCOMES // 2).to(x.dtype)
        return x * keep.mul_(OUTCOMES / (OUTCOMES - dropped))
