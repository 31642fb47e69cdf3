"""The variants of `femixer mad study`: a mixer, how it starts, and how its gates and temperatures are trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from femixer.gates import raw_temperature
from femixer.mixer import GATES, FreeEnergyMixer
from femixer.models.named import baseline, fem
from femixer.projection import Projection
from femixer.training import adamw


@dataclass(frozen=True)
class Variant:
    """A mixer and its start; None is what the mixer says itself."""

    parts: str | None = None
    """None: plain attention."""
    start: Literal["paper", "prior"] = "paper"
    lam: float | None = None
    """Where lambda starts; needs start="prior", which gives it odds."""
    maps: Literal["zero", "normal", "torch"] | None = None
    """How the maps of lambda and g start; "torch" also starts those of the conditioner so."""
    beta: float | None = None
    """Where beta_max starts."""
    without: str = ""
    """A column that the conditioner does not modulate: v, lam, gate, q or k."""
    decay: float = 0.0
    """Weight decay of the temperatures."""
    rate: float = 1.0
    """Multiple of the learning rate of temperatures, and of the maps and biases of lambda and g."""

    def fields(self) -> dict[str, Any]:
        """Of FEMConfig."""
        if self.parts is None:
            return baseline("attention")
        return {**fem("softmax", self.parts), **({"start": self.start} if self.start != "paper" else {})}


VARIANTS: dict[str, Variant] = {
    "attention": Variant(),
    "CLTG-paper": Variant("CLTG"),
    "CLTG-prior": Variant("CLTG", "prior"),
    "LTG-paper": Variant("LTG"),
    "LTG-prior": Variant("LTG", "prior"),
    "C": Variant("C"),
    "G": Variant("G", "prior"),
    "LT": Variant("LT", "prior"),
    "G-rate-0.3": Variant("G", "prior", rate=0.3),
    "LTG-rate-0.3": Variant("LTG", "prior", rate=0.3),
    "CLTG-torch": Variant("CLTG", maps="torch"),
    "LTG-torch": Variant("LTG", maps="torch"),
    "CLTG-lam-0.05": Variant("CLTG", "prior", lam=0.05),
    "LTG-lam-0.05": Variant("LTG", "prior", lam=0.05),
    "CLTG-lam-0.5": Variant("CLTG", "prior", lam=0.5),
    "LTG-lam-0.5": Variant("LTG", "prior", lam=0.5),
    "CLTG-maps-normal": Variant("CLTG", "prior", maps="normal"),
    "CLTG-lam-0.05-maps-normal": Variant("CLTG", "prior", lam=0.05, maps="normal"),
    "CLTG-beta-1": Variant("CLTG", "prior", beta=1.0),
    "CLTG-beta-0.5": Variant("CLTG", "prior", beta=0.5),
    "CLTG-lam-0.05-beta-0.02": Variant("CLTG", "prior", lam=0.05, beta=0.02),
    "CLTG-without-v": Variant("CLTG", "prior", without="v"),
    "CLTG-without-lam": Variant("CLTG", "prior", without="lam"),
    "CLTG-without-gate": Variant("CLTG", "prior", without="gate"),
    "CLTG-without-q": Variant("CLTG", "prior", without="q"),
    "CLTG-without-k": Variant("CLTG", "prior", without="k"),
    "CLTG-decay-0.1": Variant("CLTG", "prior", decay=0.1),
    "CLTG-rate-3": Variant("CLTG", "prior", rate=3.0),
    "CLTG-rate-0.3": Variant("CLTG", "prior", rate=0.3),
    "CG": Variant("CG", "prior"),
    "CLT": Variant("CLT", "prior"),
}
"""The most telling ones first."""


def mixers(model: nn.Module) -> list[FreeEnergyMixer]:
    return [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]


def columns(parameter: Tensor, projection: Projection, *names: str) -> list[Tensor]:
    """Rows of a parameter of the projection that are the columns of these names, sharing its memory."""
    rows = parameter.detach().split(projection.widths)
    return [each for name, each in zip(projection.columns, rows, strict=True) if name in names]


@torch.no_grad()
def begin(model: nn.Module, variant: Variant) -> None:
    """Start the mixers as the variant says, where that is not how they start anyway."""
    for mixer in mixers(model):
        if variant.lam is not None and mixer.lam_odds is not None:
            mixer.lam_odds.fill_(variant.lam / (1 - variant.lam))
        if variant.beta is not None and mixer.raw_beta is not None:
            mixer.raw_beta.fill_(raw_temperature(variant.beta))
        if variant.maps in ("zero", "normal"):
            for rows in columns(mixer.value_proj.linear.weight, mixer.value_proj, *GATES):
                nn.init.normal_(rows, std=0.02) if variant.maps == "normal" else nn.init.zeros_(rows)
        for projection in (mixer.prior_proj, mixer.value_proj) if variant.without else ():
            if projection is not None and projection.modulation is not None:
                projection.modulation.register_hook(without_columns(projection, variant.without))


def without_columns(projection: Projection, name: str) -> Callable[[Tensor], Tensor]:
    """A hook of the gradient of the modulation, which starts at zero: these columns of it stay there."""

    def hook(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        for rows in columns(kept, projection, name):
            rows.zero_()
        return kept

    return hook


def optimizer_of(model: nn.Module, variant: Variant, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, in which temperatures may decay, and temperatures and gates learn at a rate of their own."""
    optimizer = adamw(model, lr, weight_decay, fused=True)
    bare = [p for m in mixers(model) for p in (m.raw_beta, m.lam_odds) if p is not None]
    if bare and (variant.decay or variant.rate != 1):
        known = {id(p) for p in bare}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in known]
        decay = {id(m.raw_beta): variant.decay for m in mixers(model)}
        for p in bare:
            own = {"params": [p], "lr": lr * variant.rate, "weight_decay": decay.get(id(p), 0.0)}
            optimizer.add_param_group(own)
    if variant.rate != 1:
        rows = [each for m in mixers(model) for each in columns(m.value_proj.linear.weight, m.value_proj, *GATES)]
        hurry(optimizer, rows, variant.rate)
    return optimizer


def hurry(optimizer: torch.optim.Optimizer, rows: Sequence[Tensor], rate: float) -> None:
    """Parts of parameters move `rate` times as far at every step: AdamW has rates for whole parameters only."""
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before[:] = [each.clone() for each in rows]

    def move(*_: Any) -> None:
        for each, old in zip(rows, before, strict=True):
            each.copy_(torch.lerp(old, each, rate))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(move)
