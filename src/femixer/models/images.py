"""What a model sees of an image: its middle, resized, as pixels; the same as an image processor of transformers; and
which patches the channels of a layer read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from femixer.free_energy import posterior
from femixer.gates import temperature_gate
from femixer.mixer import FreeEnergyMixer
from femixer.models.files import auto_map, write_module
from femixer.models.language import check_arguments
from femixer.models.vision import FEMForImageClassification, FEMVisionConfig, FEMVisionModel
from femixer.optional import require
from femixer.options import check
from femixer.rotary import Grid, on_grid

Image = Any
"""A PIL.Image.Image in mode L or RGB."""
MODES = {1: "L", 3: "RGB"}
"""channels -> mode of a decoded image, with 8 bits per channel."""
DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
"""Modes of images with more than 8 bits."""
RANGES = (1.0, 255.0, 65535.0)
"""Largest values of images: shares of white, 8 and 16 bits."""


class Unreadable(Exception):
    """An image cannot be read; the message says why."""


def upright(image: Image, channels: int) -> Image:
    """Turned as EXIF says, with 1 or 3 channels of 8 bits; transparent parts are white."""
    return converted(require("PIL.ImageOps", "vision").exif_transpose(image), channels)


def converted(image: Image, channels: int) -> Image:
    """Another mode, of 8 bits."""
    pil = require("PIL.Image", "vision")
    if image.mode in DEEP:
        image = pil.fromarray(shallow(np.asarray(image), image.mode))
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", whole.size, "white"), whole)
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def shallow(pixels: np.ndarray, mode: str) -> np.ndarray:
    """Deep pixels in uint8; of 16 bits the upper 8. Modes I and F do not tell the range: the least that holds them."""
    values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    largest = RANGES[-1] if mode.startswith("I;16") else next((r for r in RANGES if values.max(initial=0) <= r), None)
    if mode == "I" and largest == 1:
        largest = RANGES[1]  # whole numbers: black and nearly black
    if largest is None or values.min(initial=0) < 0:
        raise Unreadable(f"pixels from {values.min():g} to {values.max():g}, of a range that is not known")
    return (values / 256 if largest == RANGES[-1] else values * (255 / largest)).clip(0, 255).astype(np.uint8)


def resized(image: Image, width: int, height: int, box: tuple[float, ...] | None = None) -> Image:
    """A part of the image, left, top, right, bottom, at another size, bicubic."""
    if box is None and image.size == (width, height):
        return image
    return image.resize((width, height), require("PIL.Image", "vision").Resampling.BICUBIC, box=box)


def middle(image: Image, size: int, share: float) -> Image:
    """The middle size x size pixels, of an image whose shorter side is first made size / share long."""
    shorter = round(size / share)
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    if (width, height) == (size, size):
        return resized(image, size, size)
    # The same pixels as of the whole image at that size, which a very long one would fill the memory with.
    left, top = (width - size) // 2, (height - size) // 2
    across, down = image.width, image.height
    box = left * across / width, top * down / height, (left + size) * across / width, (top + size) * down / height
    return resized(image, size, size, box)


def as_tensor(image: Image) -> Tensor:
    """[C, H, W] in uint8."""
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


class FEMImageProcessor(BaseImageProcessor):
    """Prepares images as `femixer vision eval` does: the shorter side becomes image_size / crop long, the middle is
    cut out, grey or in colour, and pixels are normalized. An image is one of Pillow's, or an array in uint8, [H, W] or
    [H, W, C] with 1, 3 or 4 channels. (A pipeline of transformers converts it to RGB first, in its own way.)
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
        """One image or several -> pixel_values [B, C, image_size, image_size]."""
        check_arguments(given)
        several = images if isinstance(images, (list, tuple)) else [images]
        shown = [middle(upright(opened(each), self.num_channels), self.image_size, self.crop) for each in several]
        pixels = torch.stack([as_tensor(each) for each in shown])
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return BatchFeature({"pixel_values": (pixels / 255 - mean) / deviation}, tensor_type=return_tensors)


def opened(image: Any) -> Image:
    """An image of Pillow's, or an array as one."""
    if hasattr(image, "convert"):
        return image
    pixels = np.asarray(image)
    fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if pixels.dtype != np.uint8 or not fits:
        given = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"images has {given}; allowed is uint8, [H, W] or [H, W, C] with 1, 3 or 4 channels")
    return require("PIL.Image", "vision").fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


QUERIES = ("token", "mean")


class PatchMaps(NamedTuple):
    """Weights of the patches, each [B, heads, channels, rows, columns] unless said otherwise. With the weight of the
    class token, where there is one, they sum to one.

    read: (1 - lam) prior + lam posterior, the derivative of the channel's read in the value of each patch.
    posterior: at beta_max, as in `inspect`. prior: [B, heads, rows, columns] where all channels of a head share it.
    """

    read: Tensor
    posterior: Tensor
    prior: Tensor


@torch.no_grad()
def patch_maps(
    model: FEMVisionModel | FEMForImageClassification, pixel_values: Tensor, layer: int = -1, query: str | None = None
) -> PatchMaps:
    """The patches that the mixer of a layer reads in images [B, C, H, W], in float64.

    query: "token", the class token; "mean", the patches, as the mean of their maps; None: as the model pools.
    """
    vision = model.model if isinstance(model, FEMForImageClassification) else model
    query = vision.config.pooling if query is None else query
    allowed = QUERIES[1:] if vision.config.pooling == "mean" else QUERIES
    check(query in allowed, "query", query, f"one of {', '.join(allowed)}, or None")
    layers = len(vision.layers)
    check(-layers <= layer < layers, "layer", layer, f"a number from {-layers} to {layers - 1}")
    block: Any = vision.layers[layer]
    if not isinstance(block.mixer, FreeEnergyMixer):
        raise ValueError(
            f"layer={layer} has mixer={type(block.mixer).__name__}, which cannot be inspected; only FEM can"
        )
    training = model.training
    try:
        model.eval()
        x, grid = vision.embedding(pixel_values)
        for before in vision.layers[: layer % layers]:
            x = before(x, grid)
        with on_grid(grid):
            return _maps(block.mixer, block.mixer_norm(x), grid, query)
    finally:
        model.train(training)


def _maps(mixer: FreeEnergyMixer, x: Tensor, grid: Grid, query: str) -> PatchMaps:
    """Of the mixer's input x [B, T, dim], whose last tokens are the patches of an image."""
    (inputs, v, lam_logits, _, _), layout = mixer.prepare(x)
    first = x.shape[1] - grid.rows * grid.columns
    queries = torch.arange(first, x.shape[1]) if query == "mean" else torch.zeros(1, dtype=torch.long)
    queries = queries.to(x.device)

    def per_head(t: Tensor) -> Tensor:
        """[B, T, heads or kv_heads, D] -> [B, H, T, D] in float64"""
        return t.double().repeat_interleave(mixer.heads // t.shape[2], 2).transpose(1, 2)

    def of_patches(weights: Tensor) -> Tensor:
        """[B, H, queries, T] or [.., T, D] -> [B, H, rows, columns] or [B, H, D, rows, columns]"""
        mean = weights.mean(2)[:, :, first:]
        return (mean if mean.dim() == 3 else mean.transpose(2, 3)).unflatten(-1, grid)

    prior = mixer.prior
    p, values = prior.weights(inputs, layout, queries), per_head(prior.over_index(v))
    p = p.expand(len(x), *p.shape[1:])
    beta = mixer.beta_max.double()[:, None]
    at_max = posterior(p, values, beta)
    read = at_max
    if lam_logits is not None:
        lam = per_head(temperature_gate(lam_logits))[:, :, queries]
        read = torch.lerp(p if p.dim() == 5 else p[..., None], at_max, lam[..., None, :])
    return PatchMaps(*(of_patches(prior.over_tokens(weights)) for weights in (read, at_max, p)))
