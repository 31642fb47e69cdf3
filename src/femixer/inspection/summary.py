"""Means over the tokens: which layers, heads and channels leave the prior."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from femixer.finite import check_numbers
from femixer.inspection.model import Layer

MEANS = {"lam": "lambda", "gate": "gate", "hidden_beta": "hidden beta", "kl": "KL (nats)"}


def means(layer: Layer) -> dict[str, Any]:
    """Means over tokens: each quantity per head [H], over channels too, and `kl_channels` [H, D]."""
    r = layer.inspection
    assert r is not None
    found = {name: getattr(r, name)[0].double().mean((1, 2)).tolist() for name in MEANS}
    check_numbers(found, f"what {layer.name} reads")
    return {**found, "kl_channels": r.kl[0].double().mean(1).tolist()}


def channels_by_kl(layer: Layer, count: int) -> list[list[int]]:
    """Per head the `count` channels with the largest mean KL, the largest first."""
    assert layer.inspection is not None
    kl: Tensor = layer.inspection.kl[0].double().mean(1)
    return kl.argsort(dim=1, descending=True, stable=True)[:, :count].tolist()


def table_row(number: int, layer: Layer) -> str:
    """A row of the table under HEADING: means over tokens, heads and channels, and the channel with the largest KL."""
    if layer.inspection is None:
        return _line(number, layer.prior, "", *[""] * len(MEANS), layer.missing)
    found = means(layer)
    numbers = [f"{sum(found[name]) / len(found[name]):.3f}" for name in MEANS]
    kl, head, channel = max((kl, h, d) for h, row in enumerate(found["kl_channels"]) for d, kl in enumerate(row))
    largest = f"{kl:.3f} (head {head}, channel {channel})" if kl >= 5e-4 else "none"
    return _line(number, layer.prior, layer.parts or "none", *numbers, largest)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


HEADING = _line("layer", "prior", "parts", *MEANS.values(), "largest mean KL of a channel") + "|---" * 8 + "|\n"
