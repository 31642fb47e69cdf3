"""How many parameters a layer has, and what for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from femixer.bench.layer.options import Options
from femixer.bench.mixers import Mixer


@dataclass(frozen=True)
class Parameters:
    """All mixers share the budget of the matrices; the conditioner comes on top. prior: what the prior holds itself,
    besides the projections made for it."""

    total: int
    matrices: int
    biases: int
    temperatures: int
    prior: int
    conditioner: int
    conditioner_share: float

    @classmethod
    def of(cls, mixer: Mixer, options: Options) -> Parameters:
        layer = mixer.build(options, not options.encoder)
        # The same layer without a conditioner: its other widths do not depend on it.
        plain = layer
        if mixer.parts:
            plain = replace(mixer, parts=mixer.parts.replace("C", "")).build(options, not options.encoder)
        total = _count(layer)
        conditioner = total - _count(plain)
        own = _count(plain, lambda name: name.startswith("prior."))
        matrices, biases = (_count(plain, _outside_prior(kind)) for kind in ("weight", "bias"))
        temperatures = _count(plain) - own - matrices - biases
        return cls(total, matrices, biases, temperatures, own, conditioner, conditioner / total)


def _count(layer: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> int:
    return sum(parameter.numel() for name, parameter in layer.named_parameters() if counts(name))


def _outside_prior(kind: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(kind) and not name.startswith("prior.")
