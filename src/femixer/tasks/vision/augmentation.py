"""Augmentation of training pictures: what is done, and in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Generator, Tensor

from femixer.models.vision.pictures import Picture, middle
from femixer.options import check
from femixer.tasks.vision.cropping import random_crop, random_flip
from femixer.tasks.vision.erasing import erase
from femixer.tasks.vision.mixing import mix, soft
from femixer.tasks.vision.moving import move
from femixer.tasks.vision.preparation import Preparation
from femixer.tasks.vision.randaugment import FULL, jitter, randaugment


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
        check(self.repeats > 0, "repeats", self.repeats, "a whole number above 0")

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
