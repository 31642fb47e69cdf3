"""Options of `femixer bench scaling`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from femixer.bench.mixers import ATTENTION, Mixer
from femixer.bench.options import MixerOptions, check_distinct, check_positive
from femixer.options import check
from femixer.priors import PRIORS
from femixer.priors.parsing import parse_prior


@dataclass(frozen=True)
class Options(MixerOptions):
    """Time per token and peak memory against the length of the sequence, and speed of decoding against the position.

    The results are scaling.json, scaling.md and scaling.png. What scaling.json already holds is not measured again, so
    an interrupted run goes on with the same command. Tables and figure show everything in scaling.json.
    """

    dim: int = 512
    """Width of the tokens."""
    heads: int = 8
    """Heads; divides dim."""
    batch: int = 1
    """Sequences side by side, also when decoding."""
    rounds: int = 5
    """Rounds measured; a round is one sample of every length, or of every position."""
    warmup: int = 1
    """Rounds before that, not counted."""
    priors: tuple[str, ...] = (ATTENTION, *PRIORS)
    """Attention, and the priors of FEM, each alone or with options: gla, gla:decay=channel,
    name:option=value,option=value."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    lengths: tuple[int, ...] = tuple(2**n for n in range(9, 17))
    """Tokens of a sequence."""
    training: bool = False
    """Measure forward + backward too."""
    positions: tuple[int, ...] = tuple(10**n for n in range(1, 7))
    """Tokens seen when decoding one more."""
    quadratic_limit: int = 8192
    """The largest length and position for mixers that keep every token in their state (softmax, attention)."""
    overwrite: bool = False
    """Throw away what scaling.json holds and measure everything anew."""

    @property
    def mixers(self) -> list[Mixer]:
        return [Mixer() if prior == ATTENTION else Mixer(prior, self.parts) for prior in self.priors]

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "training") if self.training else ("forward",)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the number at a point, as opposed to which points are measured."""
        which = ("priors", "lengths", "training", "positions", "quadratic_limit", "overwrite", "targets", "out")
        return {name: value for name, value in asdict(self).items() if name not in which}

    def validate(self) -> None:
        super().validate()
        check_positive("quadratic_limit", self.quadratic_limit)
        for name in ("lengths", "positions"):
            for value in getattr(self, name):
                check_positive(name, value)
        for name in ("priors", "lengths", "positions"):
            check_distinct(name, getattr(self, name))
        shortest = min(self.lengths)
        check(shortest <= self.quadratic_limit, "quadratic_limit", self.quadratic_limit, f"at least {shortest}")
        for mixer in self.mixers:
            if mixer.prior != ATTENTION:
                parse_prior(mixer.prior, "priors")
