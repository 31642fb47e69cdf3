"""Options of `femixer bench vision`."""

from __future__ import annotations

from dataclasses import dataclass

from femixer.bench.options import BenchOptions, check_distinct, check_positive
from femixer.models import VISION_PRESETS
from femixer.models.vision.config import POSITIONS
from femixer.options import check
from femixer.priors.parsing import parse_prior


@dataclass(frozen=True)
class Options(BenchOptions):
    """Vision models: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are vision.json and vision.md.
    """

    batch: int = 8
    """Images of a step."""
    rounds: int = 10
    """Rounds measured; a round is one step of every model."""
    warmup: int = 2
    """Rounds before that, not counted."""
    preset: str = "deit-tiny"
    """Size of the models: deit-tiny, deit-small or digits."""
    image_size: int | None = None
    """Height and width of the images (default: the preset's)."""
    positions: str = "learned"
    """Positions of the patches: learned or rotary."""
    priors: tuple[str, ...] = ("softmax", "gla")
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    compile: bool = False
    """Train with torch.compile, whose own time is not counted."""

    def validate(self) -> None:
        super().validate()
        check(self.preset in VISION_PRESETS, "preset", self.preset, f"one of {', '.join(VISION_PRESETS)}")
        check(self.positions in POSITIONS, "positions", self.positions, f"one of {', '.join(POSITIONS)}")
        if self.image_size is not None:
            check_positive("image_size", self.image_size)
        check_distinct("priors", self.priors)
        for prior in self.priors:
            parse_prior(prior, "priors")
