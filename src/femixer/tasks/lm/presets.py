"""`femixer lm presets`: the parameters of every preset, for every mixer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from femixer.models import PRESETS, preset
from femixer.models.parameters import parameter_count
from femixer.options import check, parse
from femixer.priors import PRIORS


@dataclass(frozen=True)
class Command:
    """The sizes of the presets, and the parameters that each prior gives them (all parts), against plain attention."""

    vocab_size: int = 32000
    """Tokens of the vocabulary."""
    parts: str = "CLTG"
    """Parts of the free energy mixer."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "lm presets")
    check(command.vocab_size > 0, "vocab_size", command.vocab_size, "a whole number above 0")
    for line in table(command):
        print(line, flush=True)
    return 0


def table(command: Command) -> Iterator[str]:
    yield f"| preset | width | layers | heads | context | plain attention | {' | '.join(PRIORS)} |"
    yield "|---|" + "---:|" * (5 + len(PRIORS))
    for name, sizes in PRESETS.items():
        plain = count(name, vocab_size=command.vocab_size, mixer="attention")
        priors = (count(name, vocab_size=command.vocab_size, prior=prior, parts=command.parts) for prior in PRIORS)
        shown = " | ".join(f"{parameters / plain - 1:+.2%}" for parameters in priors)
        yield f"| {name} | {' | '.join(map(str, sizes.values()))} | {plain:,} | {shown} |"


def count(name: str, **options: Any) -> int:
    """The parameters of a preset, whose layers are all alike: one layer is counted, and the others from two."""
    one, two = (parameter_count(preset(name, **{**options, "num_hidden_layers": layers})) for layers in (1, 2))
    return one + (preset(name).num_hidden_layers - 1) * (two - one)
