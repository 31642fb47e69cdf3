"""Labels as probabilities, and pictures mixed with others: mixup (Zhang et al., 2018), CutMix (Yun et al., 2019)."""

from __future__ import annotations

import math

from torch import Generator, Tensor
from torch.nn import functional as F

from femixer.tasks.vision.drawing import beta, integer, uniform


def soft(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """labels [B] -> probabilities [B, classes]: 1 - smoothing for the label, and smoothing spread over all classes."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def mix(
    pixels: Tensor, targets: Tensor, mixup_alpha: float, cutmix_alpha: float, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself in reverse: by mixup or by CutMix, one as likely as the other if both are above 0."""
    if mixup_alpha == 0 and cutmix_alpha == 0:
        return pixels, targets
    cut = cutmix_alpha > 0 and (mixup_alpha == 0 or uniform(generator) < 0.5)
    if cut:
        return cutmix(pixels, targets, beta(generator, cutmix_alpha), generator)
    return mixup(pixels, targets, beta(generator, mixup_alpha))


def mixup(pixels: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """share * own + (1 - share) * other's, of pixels [B, C, H, W] and of targets [B, classes]."""
    return pixels.lerp(pixels.flip(0), 1 - share), targets.lerp(targets.flip(0), 1 - share)


def cutmix(pixels: Tensor, targets: Tensor, share: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """A box of the other picture, about 1 - share of the area; the targets go by the pixels that it really has."""
    height, width = pixels.shape[-2:]
    top, bottom = interval(height, share, generator)
    left, right = interval(width, share, generator)
    mixed = pixels.clone()
    mixed[..., top:bottom, left:right] = pixels.flip(0)[..., top:bottom, left:right]
    others = (bottom - top) * (right - left) / (height * width)
    return mixed, targets.lerp(targets.flip(0), others)


def interval(length: int, share: float, generator: Generator) -> tuple[int, int]:
    """sqrt(1 - share) of a side around a random middle, cut off where it ends."""
    half, middle = int(length * math.sqrt(1 - share)) / 2, integer(generator, length)
    return max(0, int(middle - half)), min(length, int(middle + half))
