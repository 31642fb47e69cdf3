"""`femixer lm presets`: the parameters of every preset, for every mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from femixer.models import PRESETS, FEMForCausalLM, preset
from femixer.options import parse
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
    print(table(command), end="")
    return 0


def table(command: Command) -> str:
    lines = [
        f"| preset | width | layers | heads | context | plain attention | {' | '.join(PRIORS)} |",
        "|---|" + "---:|" * (5 + len(PRIORS)),
    ]
    for name, sizes in PRESETS.items():
        plain = parameters(name, vocab_size=command.vocab_size, mixer="attention")
        ratios = [
            parameters(name, vocab_size=command.vocab_size, prior=prior, parts=command.parts) / plain
            for prior in PRIORS
        ]
        shown = " | ".join(f"{ratio - 1:+.2%}" for ratio in ratios)
        lines.append(f"| {name} | {' | '.join(map(str, sizes.values()))} | {plain:,} | {shown} |")
    return "\n".join(lines) + "\n"


def parameters(name: str, **fields: object) -> int:
    with torch.device("meta"):  # nothing is stored, so the large ones are counted as quickly as the small ones
        return sum(p.numel() for p in FEMForCausalLM(preset(name, **fields)).parameters())
