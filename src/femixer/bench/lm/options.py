"""Options of `femixer bench lm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from femixer.bench.options import MixerOptions, check_distinct, check_positive
from femixer.options import check
from femixer.priors.parsing import parse_prior

Measure = Literal["training", "decode"]
MEASURES: tuple[Measure, ...] = ("training", "decode")


@dataclass(frozen=True)
class Options(MixerOptions):
    """Language models: speed of training and of greedy decoding, and the size of the cache, as ratios.

    FEM is compared with the plain transformer (the same model with attention) and with transformers' Llama, both of the
    same size. Every ratio compares two samples of the same round, and the table gives the median over the rounds with
    the quartiles. The results are lm.json and lm.md.
    """

    dim: int = 512
    """Width of the tokens."""
    heads: int = 8
    """Heads; divides dim."""
    layers: int = 8
    """Layers."""
    vocabulary: int = 8192
    """Tokens of the vocabulary."""
    batch: int = 2
    """Sequences of a training step."""
    length: int = 1024
    """Tokens of a training sequence."""
    rounds: int = 10
    """Rounds measured; a round is one sample of every contestant."""
    warmup: int = 2
    """Rounds before that, not counted."""
    priors: tuple[str, ...] = ("softmax", "gla", "aft", "mamba")
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    measure: tuple[Measure, ...] = MEASURES
    """What to measure: training steps, decoding, or both."""
    compile: bool = False
    """Train with torch.compile, whose own time is not counted. Decoding is always eager."""
    contexts: tuple[int, ...] = (128, 1024, 4096)
    """Tokens seen when decoding goes on; a table for each."""
    decode_batch: int = 1
    """Sequences decoded side by side."""
    decode_steps: int = 32
    """Tokens decoded per sample, from the same cache each time; their median is the sample."""

    def validate(self) -> None:
        super().validate()
        for name in ("dim", "heads", "layers", "vocabulary", "decode_batch"):
            check_positive(name, getattr(self, name))
        even = 2 * self.heads  # the rivals rotate pairs of channels
        check(
            self.dim % even == 0,
            "dim",
            self.dim,
            f"a multiple of {even}: an even number for each of {self.heads} heads",
        )
        divides = self.kv_heads is None or (self.kv_heads > 0 and self.heads % self.kv_heads == 0)
        check(divides, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        check(self.length > 1, "length", self.length, "a whole number above 1: a token and one to predict")
        for context in self.contexts:
            check(context > 1, "contexts", context, "whole numbers above 1")
        for name in ("priors", "measure", "contexts"):
            check_distinct(name, getattr(self, name))
        for measure in self.measure:
            check(measure in MEASURES, "measure", measure, f"one or more of {', '.join(MEASURES)}")
        for prior in self.priors:
            parse_prior(prior, "priors")
