"""Augmentation of training pictures: what is done, and in which order."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from femixer.models.vision.pictures import Picture, middle
from femixer.options import check, check_positive
from femixer.tasks.vision.data.operations import (
    FULL,
    beta,
    integer,
    jitter,
    randaugment,
    random_crop,
    random_flip,
    uniform,
)
from femixer.tasks.vision.data.pictures import Preparation


def move(pixels: Tensor, shift: float, turn: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W] in [0, 1], each shifted by up to `shift` pixels and turned by up to `turn` degrees, bilinear.

    What comes into view is 0.
    """
    if shift == 0 and turn == 0:
        return pixels
    count, _, height, width = pixels.shape
    drawn = 2 * torch.rand(count, 3, generator=generator) - 1
    angle = drawn[:, 0] * math.radians(turn)
    cos, sin = angle.cos(), angle.sin()
    across, down = drawn[:, 1] * shift * 2 / width, drawn[:, 2] * shift * 2 / height  # a side is 2 long here
    rows = [torch.stack([cos, -sin * height / width, across], -1), torch.stack([sin * width / height, cos, down], -1)]
    grid = F.affine_grid(torch.stack(rows, 1), [*pixels.shape], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


AREAS = (0.02, 1 / 3)
"""Of the picture."""
FLATTEST = 0.3
"""Height / width of a box is between this and its inverse."""
TRIES = 10


def erase(pixels: Tensor, probability: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W], normalized: each picture with this probability gets a box of standard normal noise."""
    if probability == 0:
        return pixels
    pixels = pixels.clone()
    channels, height, width = pixels.shape[1:]
    for picture in pixels:
        if uniform(generator) < probability:
            top, left, h, w = random_box(height, width, generator)
            picture[:, top : top + h, left : left + w] = torch.randn(channels, h, w, generator=generator)
    return pixels


def random_box(height: int, width: int, generator: Generator) -> tuple[int, int, int, int]:
    """Top, left, height, width of a box that fits; nothing if none that was drawn does."""
    for _ in range(TRIES):
        area = height * width * uniform(generator, *AREAS)
        aspect = math.exp(uniform(generator, math.log(FLATTEST), -math.log(FLATTEST)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            return integer(generator, height - h + 1), integer(generator, width - w + 1), h, w
    return 0, 0, 0, 0


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


@dataclass(frozen=True)
class Augmentation:
    """What training pictures go through; without an option, nothing."""

    smallest_crop: float = 1.0
    """Smallest share of a picture that a random crop shows; at 1 the picture is taken as in evaluation."""
    flip: float = 0.0
    """Probability that left and right are exchanged."""
    jitter: float = 0.0
    """Strength of random brightness, contrast and saturation, 0 to 1."""
    randaugment: float = 0.0
    """Magnitude of RandAugment, 0 (none at all) to 10."""
    shift: float = 0.0
    """Pixels that a picture is shifted by at most; for small ones, as are turns."""
    turn: float = 0.0
    """Degrees that a picture is turned by at most."""
    erasing: float = 0.0
    """Probability that a box of the picture is replaced by noise."""
    mixup: float = 0.0
    """Alpha of mixup; where --cutmix is given too, each has half of the batches."""
    cutmix: float = 0.0
    """Alpha of CutMix."""
    smoothing: float = 0.0
    """Label smoothing."""
    repeats: int = 1
    """Views of each picture in a batch (repeated augmentation); an epoch then shows a share 1/repeats of them all."""

    def validate(self) -> None:
        check(0 < self.smallest_crop <= 1, "smallest_crop", self.smallest_crop, "a share above 0 and up to 1")
        for name in ("flip", "jitter", "erasing"):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a number from 0 to 1")
        check(0 <= self.smoothing < 1, "smoothing", self.smoothing, "a number from 0 to below 1")
        check(0 <= self.randaugment <= FULL, "randaugment", self.randaugment, f"a number from 0 to {FULL:.0f}")
        for name in ("shift", "turn", "mixup", "cutmix"):
            check(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a number of at least 0")
        check_positive(repeats=self.repeats)

    @property
    def of_pictures(self) -> bool:
        """Is anything done to pictures one by one, before they are a batch?"""
        return self.smallest_crop < 1 or self.flip > 0 or self.jitter > 0 or self.randaugment > 0

    def view(self, picture: Picture, size: int, share: float, generator: Generator) -> Picture:
        """One picture as size x size pixels."""
        if self.smallest_crop < 1:
            picture = random_crop(picture, size, self.smallest_crop, generator)
        else:
            picture = middle(picture, size, share)
        if self.flip > 0:
            picture = random_flip(picture, self.flip, generator)
        if self.randaugment > 0:
            picture = randaugment(picture, self.randaugment, generator)
        return jitter(picture, self.jitter, generator) if self.jitter > 0 else picture

    def batch(
        self, pixels: Tensor, labels: Tensor, classes: int, preparation: Preparation, generator: Generator
    ) -> tuple[Tensor, Tensor]:
        """pixels [B, C, S, S] in uint8 and labels [B] -> normalized pixels and targets [B, classes]."""
        moved = move(pixels / 255, self.shift, self.turn, generator)
        erased = erase(preparation.normalized(moved), self.erasing, generator)
        return mix(erased, soft(labels, classes, self.smoothing), self.mixup, self.cutmix, generator)
