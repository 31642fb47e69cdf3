"""How a model wants its pictures: the size, the channels and the scale of the pixels; and which it has learned from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from femixer.models.vision import FEMImageProcessor
from femixer.models.vision.pictures import Picture, middle
from femixer.options import check

FILE = "preparation.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of its channels, with pixels in [0, 1]: used for all pictures in colour, as is usual."""
GREY = (0.5,), (0.5,)


@dataclass(frozen=True)
class Preparation:
    """Saved beside a model, which is of no use without it."""

    size: int
    channels: int
    crop: float = 1.0
    """Share of the shorter side that evaluation sees: it is made size / crop long, and the middle is taken."""
    pictures: str | None = None
    """Which ones the model was trained on: their `Images.whole`."""
    validation: float | None = None
    """Share of them that was held out of training; None: they have a validation part."""

    def fixed(self, picture: Picture) -> Picture:
        """The view that evaluation has of a picture."""
        return middle(picture, self.size, self.crop)

    def normalized(self, pixels: Tensor) -> Tensor:
        """[..., C, H, W] in [0, 1] -> mean and deviation of about 0 and 1."""
        mean, deviation = (torch.tensor(values, device=pixels.device)[:, None, None] for values in self.scale)
        return (pixels - mean) / deviation

    @property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return GREY if self.channels == 1 else IMAGENET

    def save(self, folder: Path) -> None:
        mean, deviation = self.scale
        about = {**asdict(self), "mean": mean, "deviation": deviation, "resampling": "bicubic"}
        (folder / FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        FEMImageProcessor(self.size, self.channels, self.crop, mean, deviation).save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> Preparation:
        path = folder / FILE
        check(path.is_file(), "model", str(folder), f"a model of `femixer vision train`, which has {FILE}")
        about = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{each.name: about[each.name] for each in fields(cls) if each.name in about})
