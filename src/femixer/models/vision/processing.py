"""What a model sees of a picture, for transformers' pipelines: the view that `femixer vision eval` has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from femixer.optional import require


class FEMImageProcessor(BaseImageProcessor):
    """The middle of a picture, whose shorter side is first made image_size / crop long, grey or in colours, with
    normalized pixels. A picture is one of Pillow's, or an array [H, W] or [H, W, C] in uint8."""

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        image_size: int = 224,
        num_channels: int = 3,
        crop: float = 1.0,
        image_mean: Sequence[float] = (0.485, 0.456, 0.406),
        image_std: Sequence[float] = (0.229, 0.224, 0.225),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image_size, self.num_channels, self.crop = image_size, num_channels, crop
        self.image_mean, self.image_std = [*image_mean], [*image_std]

    def __call__(self, images: Any, *_: Any, return_tensors: str | None = "pt", **__: Any) -> BatchFeature:
        return self.preprocess(images, return_tensors)

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **_: Any) -> BatchFeature:
        """One picture or several -> pixel_values [B, C, image_size, image_size]."""
        from femixer.tasks.images.decode import converted
        from femixer.tasks.images.preparation import Preparation, as_tensor

        preparation = Preparation(self.image_size, self.num_channels, self.crop)
        several = images if isinstance(images, (list, tuple)) else [images]
        image = require("PIL.Image", "vision")
        pictures = [each if hasattr(each, "convert") else image.fromarray(np.asarray(each)) for each in several]
        pixels = torch.stack([as_tensor(preparation.fixed(converted(each, self.num_channels))) for each in pictures])
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return BatchFeature({"pixel_values": (pixels / 255 - mean) / deviation}, tensor_type=return_tensors)
