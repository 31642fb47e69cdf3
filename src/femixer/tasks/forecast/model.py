"""What decides the numbers of a training (the model, the windows, how it is trained), and the model built from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from femixer.models.config import plain_refusals
from femixer.models.forecast import ForecastConfig, Forecaster, build
from femixer.models.named import NAMED, Fields, Mixing, Rivals, parameters_of, sizes_of
from femixer.options import Count, NotNegative, Rate, Rule, check, check_all, check_options, given
from femixer.tasks.forecast.data import KNOWN, Series, default_lookback
from femixer.tasks.forecast.data.files import frequency_of, season_of
from femixer.tasks.forecast.data.windows import Held, Scaling, places_of, scaling_of, section_ends
from femixer.training.engine import check_fits
from femixer.training.seeding import seeded

MODELS: dict[str, Fields] = {
    **{name: {"kind": "fem", **fields} for name, fields in NAMED.items()},
    "DLinear": {"kind": "dlinear"},
    "NLinear": {"kind": "nlinear"},
    "PatchTST": {"kind": "patchtst"},
    "iTransformer": {"kind": "itransformer"},
    "LastValue": {"kind": "last-value"},
    "SeasonalNaive": {"kind": "seasonal-naive"},
    "ETS": {"kind": "ets"},
}
SIMPLE = ("LastValue", "SeasonalNaive", "ETS")
"""Those that every other one should beat: they learn nothing, or four numbers."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, with AdamW; betas are 0.9 and 0.95, and gradients are clipped to a norm of 1."""

    epochs: Count = 100
    """Largest number of passes over all windows."""
    patience: Count = 12
    """Epochs without a better validation MSE after which training ends."""
    batch: Count = 32
    """Windows of a training step."""
    lr: Rate = 6e-4
    """Largest learning rate, after a twentieth of all epochs; it rises and falls linearly."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices (AdamW)."""
    precision: Literal["no", "bf16"] = "no"
    """Mixed precision: bf16 multiplies matrices in bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of models built from mixer layers; the others have their published sizes."""

    width: int | None = None
    """Width of the layers, by default 32 x floor(sqrt(channels))."""
    layers: int | None = None
    """Layers, by default 3."""
    heads: int | None = None
    """Heads of a layer, by default 8."""
    dropout: float | None = None
    """Dropout, by default 0.1."""
    mixing: Mixing = field(default_factory=Mixing)
    season: Count | None = None
    """Rows of a season, which SeasonalNaive repeats, by default those of a day (of a week, if rows are days)."""

    rivals: Rivals = field(default_factory=Rivals)

    def validate(self, models: Sequence[str]) -> None:
        """A ValueError if sizes are given and none of the models takes any; `specified` says which are unknown."""
        takes = any(name not in MODELS or MODELS[name]["kind"] == "fem" for name in models)
        published = Rule(f"None: {', '.join(models)} has the sizes that were published", lambda given: takes)
        check_all(self, published, "width", "layers", "heads", "dropout")
        rows = [MODELS[name] for name in models if name in MODELS and MODELS[name]["kind"] == "fem"]
        self.mixing.validate(*rows)
        self.rivals.validate(*rows)

    def fields(self) -> dict[str, Any]:
        """Of ForecastConfig, those that are given."""
        return {**sizes_of(self.width, self.layers, self.heads), **given(dropout=self.dropout)}


@dataclass(frozen=True)
class Spec:
    """Everything that decides the numbers of one training; where the file lies does not."""

    model: str
    dataset: str
    fingerprint: str
    """Of the data."""
    horizon: int
    lookback: int
    seed: int
    season: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ForecastConfig."""
    training: Training = field(default_factory=Training)

    @property
    def title(self) -> str:
        return f"{self.model} {self.dataset} {self.lookback} to {self.horizon} seed {self.seed}"


def model_name(given: str) -> str:
    """As we write it, whatever its capitals."""
    return next((name for name in MODELS if name.lower() == given.lower()), given)


def specified(
    model: str,
    series: Series,
    horizon: int,
    lookback: int | None,
    seed: int,
    sizes: Sizes,
    training: Training,
    quantiles: Sequence[float] = (),
) -> Spec:
    model = model_name(model)
    check(model in MODELS, "model", model, f"one of {', '.join(MODELS)}")
    check(seed >= 0, "seed", seed, "a whole number of at least 0")
    check_options(sizes)
    check_options(training)
    known = KNOWN.get(series.name)
    season = sizes.season or season_of(series.clock, known is not None and known.working_days)
    row = MODELS[model]
    fields = {**row}
    if row["kind"] == "fem":
        fields |= {**sizes.fields(), **sizes.mixing.fields(row), **sizes.rivals.fields(row)}
    # Only what there is: jobs without it are known by the same names as before it was possible.
    more = {"known_covariates": series.known, "past_covariates": series.past, "quantiles": quantiles}
    told = f"none with {model}: models of a mixer's layers take them (FEM-SM, SMAttn, ...), the others do not"
    for name, names in more.items():
        check(not names or row["kind"] == "fem", name.removesuffix("_covariates"), [*names], told)
    fields |= {name: [*names] for name, names in more.items() if names}
    length = default_lookback(horizon) if lookback is None else lookback
    return Spec(model, series.name, series.fingerprint, horizon, length, seed, season, fields, training)


def build_model(spec: Spec, series: Series, scaling: Scaling, held: Held | None = None) -> Forecaster:
    """Starting weights depend on the seed alone."""
    scales: dict[str, Any] = {"scaler_mean": scaling.mean.tolist(), "scaler_std": scaling.std.tolist()}
    if series.sections:
        own = zip(series.sections, scaling.mean[:, 0].tolist(), scaling.std[:, 0].tolist(), strict=True)
        known = {
            section.name: [mean, std] for section, mean, std in own if section_ends(section, spec.horizon, held)[0]
        }
        scales = {"series_scale": known, "id_column": series.id_column}
    if series.covariates is not None and MODELS[spec.model]["kind"] == "fem":
        scales["covariate_mean"] = scaling.covariate_mean.tolist()
        scales["covariate_std"] = scaling.covariate_std.tolist()
    with seeded(spec.seed, "weights"), plain_refusals():
        return build(
            ForecastConfig(
                **spec.fields,
                channels=len(series.columns),
                lookback=spec.lookback,
                horizon=spec.horizon,
                season=spec.season,
                **scales,
                label=spec.model,
                columns=[*series.columns],
                date_column=series.date_column,
                frequency=frequency_of(series.clock),
                date_format=series.date_format,
                missing_below=series.missing_below,
            )
        )


def check_possible(spec: Spec, series: Series, held: Held | None = None) -> None:
    """A ValueError unless there are windows and the model can be built: before anything is written."""
    places_of(series, spec.lookback, spec.horizon, held)
    with torch.device("meta"):
        model = build_model(spec, series, scaling_of(series, spec.horizon, held), held)
    check_fits(parameters_of(model), "width", model.config.hidden_size)
