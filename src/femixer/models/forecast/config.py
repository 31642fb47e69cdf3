"""The configuration of a forecaster, with the scale and the names of the series that it was trained on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from femixer.models.config import LARGEST, FEMConfig, check_types, mixer_fields
from femixer.options import check

KINDS = ("fem", "dlinear", "nlinear", "patchtst", "itransformer", "last-value", "seasonal-naive", "ets")
# Up to as many channels a data set counts as small: PatchTST and iTransformer were published with a small setting for
# such (ETT has 7, the next larger, Weather, 21).
FEW_CHANNELS = 8


class Sizes(NamedTuple):
    """Sizes of a forecaster with layers; `intermediate` is the width inside of their MLP."""

    layers: int
    heads: int
    width: int
    intermediate: int
    dropout: float


# The fields of the configuration that hold them, in this order.
FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "dropout")


@strict
class ForecastConfig(PreTrainedConfig):
    """Sizes of a forecaster, its mixer and what is needed to read and write series in the user's own units.

    Sizes that are None are filled in by kind, as published:

        fem           3 layers, 8 heads, width 32 int(sqrt(channels)) and at least 32, MLP 4 x width, dropout 0.1
        patchtst      3 layers; 4 heads, width 16, MLP 128, dropout 0.3 for few channels (published for ETTh), else
                      16 heads, width 128, MLP 256, dropout 0.2
        itransformer  8 heads, dropout 0.1; 2 layers, width and MLP 256 for few channels, else 3 layers, 512

    mixer, prior, parts, budget, start, readout, mixer_temperature, mixer_options, prior_options, rope: as in FEMConfig,
    read by kind="fem" only.
    scaler_mean, scaler_std: per channel, of the training rows; the model works on (x - mean) / std, and `predict` goes
    there and back. frequency (of pandas, such as "h"), columns, date_column and date_format: of what it was trained on.
    missing_below: values at or below it mean missing, there and in `predict`.

    known_covariates, past_covariates: names of columns that are read besides (`window.py`), covariate_mean and
    covariate_std of the known and then the past ones; quantiles: that are forecast besides the mean, ascending;
    all three kind="fem" only. conformal_levels: in percent, of which the model has widths (`window.py`).
    id_column, series_scale: of a model of many series (long frames), name -> mean and std of each. label: what the
    column of a forecast is called there.
    """

    model_type = "fem-forecaster"

    kind: str = "fem"
    channels: int = 1
    lookback: int = 336
    horizon: int = 96
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    dropout: float | None = None
    mixer: str | list[str] = "fem"
    prior: str | list[str] = "softmax"
    parts: str = "CLTG"
    budget: str = "attention"
    start: str = "paper"
    readout: str = "free_energy"
    mixer_temperature: str = "learned"
    mixer_options: dict[str, Any] | None = None
    prior_options: dict[str, Any] | None = None
    rope: bool | None = None
    season: int = 24  # points after which kind="seasonal-naive" repeats
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

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: see FEMPreTrainedModel."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        published = _published(self.kind, self.channels, self.num_attention_heads, self.hidden_size)
        for name, size in zip(FIELDS, published or (), strict=False):
            if getattr(self, name) is None:
                setattr(self, name, size)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers after a change: the model must be possible."""
        check_types(self)
        check(self.kind in KINDS, "kind", self.kind, f"one of {', '.join(KINDS)}")
        for name in ("channels", "lookback", "horizon", "season", *FIELDS[:-1]):
            size = getattr(self, name)
            check(size is None or 0 < size <= LARGEST, name, size, f"a whole number from 1 to {LARGEST:,}")
        check(self.dropout is None or 0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and below 1")
        if self.hidden_size is not None and self.num_attention_heads is not None:
            multiple = f"a multiple of num_attention_heads={self.num_attention_heads}"
            check(self.hidden_size % self.num_attention_heads == 0, "hidden_size", self.hidden_size, multiple)
        for name in ("scaler_mean", "scaler_std", "columns"):
            given = getattr(self, name)
            check(given is None or len(given) == self.channels, name, given, f"one per channel, {self.channels}")
        for mean in self.scaler_mean or ():
            check(math.isfinite(mean), "scaler_mean", mean, "finite numbers")
        for std in self.scaler_std or ():
            check(0 < std < math.inf, "scaler_std", std, "numbers above 0 (1 for a constant channel)")
        self._check_extras()
        if self.kind == "fem":
            self.stack()

    def _check_extras(self) -> None:
        """Covariates and quantiles: of models that can take them."""
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

    @property
    def covariates(self) -> list[str]:
        """Names of the known and then of the past ones."""
        return [*(self.known_covariates or ()), *(self.past_covariates or ())]

    def sizes(self) -> Sizes:
        """Of a kind that has layers."""
        return Sizes(*(getattr(self, name) for name in FIELDS))

    def stack(self) -> FEMConfig:
        """The layers of kind="fem" as a configuration from which their mixers are built."""
        sizes = self.sizes()
        return FEMConfig(
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=sizes.intermediate,
            rope=self.rope,
            mixer_bias=True,
            **mixer_fields(self),
        )


def _published(kind: str, channels: int, heads: int | None, width: int | None) -> Sizes | None:
    """Sizes of a kind that has layers, with these numbers of heads and this width if they are given."""
    few = channels <= FEW_CHANNELS
    if kind == "fem":
        heads = heads or 8
        # An even number of channels per head, which rotary positions need.
        width = width or 2 * heads * -(-32 * max(1, math.isqrt(max(channels, 1))) // (2 * heads))
        return Sizes(3, heads, width, 4 * width, 0.1)
    if kind == "patchtst":
        return Sizes(3, 4, 16, 128, 0.3) if few else Sizes(3, 16, 128, 256, 0.2)
    if kind == "itransformer":
        width = width or (256 if few else 512)
        return Sizes(2 if few else 3, 8, width, width, 0.1)
    return None
