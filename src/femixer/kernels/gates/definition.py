"""The gates of a read by their definition, in float64."""

from typing import Any

import torch
from torch import Tensor


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    read = mean.double()
    if free is not None and lam is not None:
        share = lam.double().sigmoid()
        read = (1 - share) * read + share * free.double()
    if gate is not None:
        positive = torch.logaddexp(gate.double(), torch.zeros_like(gate, dtype=torch.float64))
        read = read * positive / (positive.square().mean(-1, keepdim=True) + eps).sqrt()
    return (read,)


def examples() -> dict[str, tuple[Any, ...]]:
    """As a mixer has them: logits are columns of a projection, some of them extreme; reads may be transposed."""
    torch.manual_seed(0)
    found: dict[str, tuple[Any, ...]] = {}
    for width in (1, 5, 33):
        mean = torch.randn(2, 3, 7, width).transpose(1, 2)
        free = mean + torch.rand(2, 7, 3, width)
        projected = 8 * torch.randn(2, 7, 2 * 3 * width + 1)
        projected[0, 0, : 3 * width // 2] = -200.0
        projected[1, 3, 3 * width :] = 200.0
        lam, gate = (part.unflatten(-1, (3, width)) for part in projected[..., 1:].split(3 * width, -1))
        found[f"width {width}"] = (mean, free, lam, gate, 1e-6)
    found |= {
        "no gate": (mean, free, lam, None, 1e-6),
        "no temperature": (mean, None, None, gate, 1e-6),
        "large eps": (mean, free, lam, gate, 0.5),
        "one token": (*(x[:1, 2:3] for x in (mean, free, lam, gate)), 1e-6),
        "no token": (*(x[:, :0] for x in (mean, free, lam, gate)), 1e-6),
    }
    return found
