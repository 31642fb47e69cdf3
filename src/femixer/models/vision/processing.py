"""What a model sees of a picture, for those who load it with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from femixer.models.packing import check_arguments
from femixer.models.saving import auto_map, write_module
from femixer.models.vision.config import FEMVisionConfig
from femixer.models.vision.pictures import Picture, as_tensor, middle, upright
from femixer.optional import require


class FEMImageProcessor(BaseImageProcessor):
    """The view that `femixer vision eval` has of a picture: its middle, once the shorter side is image_size / crop
    long, grey or in colours, with normalized pixels. A picture is one of Pillow's, or an array in uint8, [H, W] or
    [H, W, C] with 1, 3 or 4 channels. (A pipeline of transformers makes RGB of it before, in its own way.)
    """

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

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoImageProcessor") -> None:
        """Nothing: see FEMPreTrainedModel."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a module beside it says where this class is found."""
        folder, config = Path(save_directory), FEMVisionConfig()
        folder.mkdir(parents=True, exist_ok=True)
        write_module(config, folder)
        self.auto_map = {"AutoImageProcessor": auto_map(config)["AutoImageProcessor"]}
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            del self.auto_map  # which belongs into the file alone

    def __call__(  # type: ignore[override]
        self, images: Any, return_tensors: str | None = "pt", **given: Any
    ) -> BatchFeature:
        return self.preprocess(images, return_tensors, **given)

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **given: Any) -> BatchFeature:
        """One picture or several -> pixel_values [B, C, image_size, image_size]."""
        check_arguments(given)
        several = images if isinstance(images, (list, tuple)) else [images]
        shown = [middle(upright(opened(each), self.num_channels), self.image_size, self.crop) for each in several]
        pixels = torch.stack([as_tensor(each) for each in shown])
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return BatchFeature({"pixel_values": (pixels / 255 - mean) / deviation}, tensor_type=return_tensors)


def opened(image: Any) -> Picture:
    """A picture of Pillow's, or an array as one."""
    if hasattr(image, "convert"):
        return image
    pixels = np.asarray(image)
    fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if pixels.dtype != np.uint8 or not fits:
        given = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"images has {given}; allowed is uint8, [H, W] or [H, W, C] with 1, 3 or 4 channels")
    return require("PIL.Image", "vision").fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
