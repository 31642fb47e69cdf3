"""The models that are compared: plain attention and FEM, of one size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.bench.mixers import ATTENTION, label
from femixer.bench.vision.options import Options
from femixer.models import FEMForImageClassification, FEMVisionConfig, preset
from femixer.priors.parsing import parse_prior


def contestants(options: Options) -> tuple[str, ...]:
    """Priors as on the command line, the rival first."""
    return (ATTENTION, *options.priors)


def name(prior: str, parts: str) -> str:
    return "plain attention" if prior == ATTENTION else f"{label(prior)} {parts or '(mean)'}"


def config(prior: str, options: Options) -> FEMVisionConfig:
    size: dict[str, Any] = {"positions": options.positions}
    if options.image_size is not None:
        size["image_size"] = options.image_size
    if prior == ATTENTION:
        return preset(options.preset, **size, mixer="attention")
    of_fem, given = parse_prior(prior)
    return preset(options.preset, **size, prior=of_fem, parts=options.parts, prior_options={of_fem: given})


def build(prior: str, options: Options) -> FEMForImageClassification:
    model = FEMForImageClassification(config(prior, options))
    model.to(**options.tensors)
    return model


def images(options: Options) -> dict[str, Tensor]:
    """A batch of noise, with a class for each image."""
    size = config(ATTENTION, options)
    shape = (options.batch, size.num_channels, size.image_size, size.image_size)
    classes = size.num_labels
    assert classes is not None  # transformers fills it in
    labels = torch.randint(classes, (options.batch,), device=options.device)
    return {"pixel_values": torch.randn(shape, **options.tensors), "labels": labels}
