"""What decides the numbers of a training (the model, the images, how it is trained), and the model built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from femixer.baselines import BASELINES
from femixer.models import FEMForImageClassification, FEMVisionConfig, preset
from femixer.models.config import plain_refusals
from femixer.models.files import without_bars
from femixer.models.named import NAMED, VISION_PRESETS, Mixing, Rivals, parameter_count, sizes_of
from femixer.options import BelowOne, Count, NotNegative, Positive, Rate, Share, check, check_options, given
from femixer.tasks.vision.data import PREPARATION, DataSet, Preparation
from femixer.tasks.vision.data.augmentation import Augmentation, Seen
from femixer.training.results import MODEL, new_model
from femixer.training.seeding import seeded

ENCODERS = {
    name: fields for name, fields in NAMED.items() if fields["mixer"] == "fem" or BASELINES[fields["mixer"]].encoder
}
"""The models of NAMED that can be encoders; the others are causal by definition."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, with AdamW."""

    epochs: Count = 100
    """Passes over all training images."""
    warmup_epochs: float = 5
    """Epochs in which the learning rate rises linearly; then it falls like half a cosine."""
    batch: Count = 64
    """Images of a training step, over all processes and accumulated pieces."""
    lr: Rate = 1e-3
    """Largest learning rate."""
    min_lr_fraction: Share = 0.01
    """Share of the largest learning rate that is left at the end."""
    weight_decay: NotNegative = 0.05
    """Weight decay of matrices."""
    clip: Positive | None = None
    """Largest norm of the gradient."""
    drop_path: float = 0.0
    """Stochastic depth: probability that the last block is skipped; less for those before."""
    dropout: float = 0.0
    """Dropout."""
    ema: BelowOne = 0.0
    """Decay of a moving average of the weights, which is evaluated too; 0 keeps none."""

    def validate(self) -> None:
        check_options(self)
        check(0 <= self.warmup_epochs <= self.epochs, "warmup_epochs", self.warmup_epochs, f"0 to {self.epochs} epochs")


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its images."""

    preset: str = "deit-tiny"
    """Sizes by name: deit-tiny, deit-small or digits."""
    image_size: int | None = None
    """Height and width of the images that the model sees, by default the preset's."""
    patch_size: int | None = None
    """Height and width of a patch, by default the preset's."""
    channels: Literal[1, 3] | None = None
    """1 for grey, 3 for colours; by default 1 for the digits and 3 otherwise."""
    width: int | None = None
    """Width of the layers, by default the preset's."""
    layers: int | None = None
    """Layers, by default the preset's."""
    heads: int | None = None
    """Heads of a layer, by default the preset's."""
    parameters: Count | None = None
    """Target number of parameters: sets the MLP width that comes nearest, instead of 4 x the width."""
    pooling: Literal["token", "mean"] | None = None
    """Input of the classifier: a class token or the mean of all patches; by default the preset's."""
    positions: Literal["learned", "rotary"] | None = None
    """Position encoding of the patches; by default the preset's."""
    initializer_range: Positive | None = None
    """Deviation of the starting weights of patches, MLPs and classes, by default 0.02, which suits wide layers."""
    mixing: Mixing = field(default_factory=Mixing)
    eval_crop: Seen = 1.0
    """Share of the shorter side of an image that is seen in evaluation, its middle (0.875 is usual for ImageNet)."""

    rivals: Rivals = field(default_factory=Rivals)

    def validate(self, *models: str) -> None:
        """A ValueError if options of mixers are given that none of the models takes."""
        rows = [ENCODERS[name] for name in models if name in ENCODERS]
        self.mixing.validate(*rows)
        self.rivals.validate(*rows)

    def fields(self) -> dict[str, Any]:
        """Of FEMVisionConfig, those that are given."""
        same = ("image_size", "patch_size", "pooling", "positions", "initializer_range")
        sizes = sizes_of(self.width, self.layers, self.heads)
        return {**sizes, **given(**{name: getattr(self, name) for name in same})}


@dataclass(frozen=True)
class Spec:
    """Everything that decides the numbers of one training; where the images lie does not."""

    model: str
    preset: str
    dataset: str
    fingerprint: str
    """Of the images."""
    seed: int
    eval_crop: float = 1.0
    parameters: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of FEMVisionConfig, besides the preset's."""
    training: Training = field(default_factory=Training)
    augmentation: Augmentation = field(default_factory=Augmentation)

    @property
    def title(self) -> str:
        return f"{self.model} {self.dataset} seed {self.seed}"


def specified(
    model: str, dataset: DataSet, seed: int, sizes: Sizes, training: Training, augmentation: Augmentation
) -> Spec:
    check(model in ENCODERS, "model", model, f"one of {', '.join(ENCODERS)}")
    check(seed >= 0, "seed", seed, "a whole number of at least 0")
    for options in (sizes, augmentation):
        check_options(options)
    training.validate()
    fields = {
        **ENCODERS[model],
        **sizes.mixing.fields(ENCODERS[model]),
        **sizes.fields(),
        **sizes.rivals.fields(ENCODERS[model]),
        "num_channels": dataset.channels,
        "drop_path": training.drop_path,
        "dropout": training.dropout,
    }
    what = (model, sizes.preset, dataset.name, dataset.fingerprint)
    return Spec(*what, seed, sizes.eval_crop, sizes.parameters, fields, training, augmentation)


def build_model(spec: Spec, dataset: DataSet) -> Any:
    """Starting weights depend on the seed alone."""
    config = config_of(spec, dataset)
    with seeded(spec.seed, "weights"):
        return FEMForImageClassification(config)


def config_of(spec: Spec, dataset: DataSet) -> FEMVisionConfig:
    """With MLPs of the width that brings the model nearest to the parameters that it shall have."""
    config = configured(spec, dataset)
    if spec.parameters is None:
        return config
    width = config.intermediate_size
    base, wider = (parameter_count(configured(spec, dataset, intermediate_size=each)) for each in (width, width + 1))
    fitting = width + round((spec.parameters - base) / (wider - base))
    least = base - (width - 1) * (wider - base)
    check(fitting > 0, "parameters", spec.parameters, f"at least {least:,}, those of {spec.model} besides its MLPs")
    return configured(spec, dataset, intermediate_size=fitting)


def configured(spec: Spec, dataset: DataSet, **changes: Any) -> Any:
    check(spec.preset in VISION_PRESETS, "preset", spec.preset, f"one of {', '.join(VISION_PRESETS)}")
    names = dict(enumerate(dataset.classes))
    about = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    with plain_refusals():
        return preset(spec.preset, **{**spec.fields, **changes, "num_labels": len(names)}, **about)


@dataclass(frozen=True)
class Classifier:
    """A trained model with what it must know of images."""

    model: Any
    preparation: Preparation

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.model.config.id2label
        return tuple(names[label] for label in range(len(names)))

    def save(self, folder: Path) -> None:
        with new_model(folder) as partial, without_bars():
            self.model.save_pretrained(partial)
            self.preparation.save(partial)

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """From a model folder, or from the results folder of `femixer vision train`."""
        folder = folder / MODEL if (folder / MODEL).is_dir() else folder
        preparation = Preparation.load(folder)
        with without_bars():
            model = FEMForImageClassification.from_pretrained(folder).eval()
        for name in ("channels", "size"):
            given, known = getattr(preparation, name), getattr(model.config, f"num_{name}", model.config.image_size)
            check(given == known, f"{folder / PREPARATION}: {name}", given, f"{known}, as in config.json")
        labels = [*range(model.config.num_labels)]
        names = model.config.id2label
        fits = sorted(names) == labels and all(isinstance(name, str) for name in names.values())
        check(fits, f"{folder / 'config.json'}: id2label", model.config.id2label, f"the names of {labels}")
        return cls(model, preparation)
