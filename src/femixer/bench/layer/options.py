"""Options of `femixer bench layer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from femixer.bench.mixers import Mixer
from femixer.bench.options import MixerOptions, check_distinct, check_positive
from femixer.options import check
from femixer.priors.parsing import parse_prior


@dataclass(frozen=True)
class Options(MixerOptions):
    """FEM layers against one softmax attention layer with as many parameters: speed, memory and FLOPs, as ratios.

    Times of a busy machine mean little by themselves. Every ratio here compares two calls of the same round, and the
    table gives the median over the rounds with the quartiles. The results are layer.json and layer.md.
    """

    priors: tuple[str, ...] = ("softmax",)
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: tuple[str, ...] = ("LTG", "CLTG")
    """One FEM layer per prior for each: subsets of C (conditioner), L (free energy), T (temperature gate), G (outer
    gate)."""
    lengths: tuple[int, ...] = (1024,)
    """Tokens of a sequence; a table for each."""
    forward_lengths: tuple[int, ...] = ()
    """The same, where only the forward pass is measured."""
    encoder: bool = False
    """Every token sees all others, instead of the earlier ones only; then there is no decoding to measure."""
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    """eager: plain calls; compiled: torch.compile, whose own time is not counted."""
    context: int = 4096
    """Tokens seen when decoding one more."""
    decode_batch: int = 1
    """Sequences decoded side by side."""
    busy: int = 0
    """Measure with this many other processes computing beside it, each on one thread, as on a machine that is busy."""

    @property
    def mixers(self) -> list[Mixer]:
        """The rival first."""
        return [Mixer(), *(Mixer(prior, parts) for prior in self.priors for parts in self.parts)]

    def validate(self) -> None:
        super().validate()
        for name in ("context", "decode_batch"):
            check_positive(name, getattr(self, name))
        check(self.busy >= 0, "busy", self.busy, "a whole number of at least 0")
        for name in ("lengths", "forward_lengths"):
            for length in getattr(self, name):
                check_positive(name, length)
        check_distinct("lengths with forward_lengths", (*self.lengths, *self.forward_lengths))
        for name in ("priors", "parts", "modes"):
            check_distinct(name, getattr(self, name))
        for prior in self.priors:
            parse_prior(prior, "priors")
        for mode in self.modes:
            check(mode in ("eager", "compiled"), "modes", mode, "eager, compiled or both")
