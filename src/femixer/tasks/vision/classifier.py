"""The model of a training, built from its specification or loaded from a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from femixer.models import FEMForImageClassification, FEMVisionConfig, preset
from femixer.models.parameters import parameter_count
from femixer.models.presets import VISION_PRESETS
from femixer.models.quiet import without_bars
from femixer.options import check
from femixer.tasks.vision.experiment import Spec
from femixer.tasks.vision.preparation import Preparation
from femixer.tasks.vision.source import Images
from femixer.training import atomic, derive
from femixer.training.results import MODEL


def build_model(spec: Spec, images: Images) -> Any:
    """Starting weights depend on the seed alone."""
    config = config_of(spec, images)
    with torch.random.fork_rng():
        torch.manual_seed(derive(spec.seed, "weights"))
        return FEMForImageClassification(config)


def config_of(spec: Spec, images: Images) -> FEMVisionConfig:
    """With MLPs of the width that brings the model nearest to the parameters that it shall have."""
    config = configured(spec, images)
    if spec.parameters is None:
        return config
    width = config.intermediate_size
    base, wider = (parameter_count(configured(spec, images, intermediate_size=each)) for each in (width, width + 1))
    fitting = width + round((spec.parameters - base) / (wider - base))
    least = base - (width - 1) * (wider - base)
    check(fitting > 0, "parameters", spec.parameters, f"at least {least:,}, those of {spec.model} besides its MLPs")
    return configured(spec, images, intermediate_size=fitting)


def configured(spec: Spec, images: Images, **changes: Any) -> Any:
    check(spec.preset in VISION_PRESETS, "preset", spec.preset, f"one of {', '.join(VISION_PRESETS)}")
    names = dict(enumerate(images.classes))
    about = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    try:
        return preset(spec.preset, **{**spec.fields, **changes, "num_labels": len(names)}, **about)
    except StrictDataclassError as error:  # how transformers wraps what the configuration says
        raise ValueError(str(error.__cause__ or error)) from error


def preparation_of(spec: Spec, images: Images) -> Preparation:
    size = config_of(spec, images).image_size
    return Preparation(size, images.channels, spec.eval_crop, images.whole, images.validation)


@dataclass(frozen=True)
class Classifier:
    """A trained model with what it must know of pictures."""

    model: Any
    preparation: Preparation

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.model.config.id2label
        return tuple(names[label] for label in range(len(names)))

    def save(self, folder: Path) -> None:
        try:
            atomic.remove(folder)
            with atomic.replacing(folder) as partial, without_bars():
                self.model.save_pretrained(partial)
                self.preparation.save(partial)
        except Exception as error:  # each library has its own for a full disk
            raise OSError(f"{folder} could not be saved ({error}); training is, and --resume tries again") from error

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """From a model folder, or from the results folder of `femixer vision train`."""
        folder = folder / MODEL if (folder / MODEL).is_dir() else folder
        preparation = Preparation.load(folder)
        with without_bars():
            return cls(FEMForImageClassification.from_pretrained(folder).eval(), preparation)
