"""The softmax step by its definition, in float64; without gradients, as a step has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.check import Tolerance
from femixer.kernels.softmax import definition as read

# Cached exponentials of the examples have been float32.
TOLERANCES = {torch.float64: Tolerance(1e-6, 1e-6)}


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    data: Tensor,
    shift: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    length: int,
    window: int | None,
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        width = shift.shape[3]
        keys, values = (x[:, :, :length].transpose(1, 2).double() for x in (keys, data[..., :width]))
        top = shift.detach().double()
        if k is not None and v is not None:
            keys, values = torch.cat([keys[:, :-1], k], 1), torch.cat([values[:, :-1], v], 1)
            if data.shape[3] == width:
                top = torch.maximum(top, v.double().transpose(1, 2))
        given = q, keys, values, beta, bias, segments_q, segments_k, True, window, q.shape[3] ** -0.5
        return *read.forward(*given), top


def examples() -> dict[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def example(
        length: int = 67,
        size: float = 1.0,
        above: float = 0.0,
        *,
        heads: int = 2,
        beta: bool = True,
        exponentials: bool = False,
        written: bool = False,
        bias: bool = False,
        segments: bool = False,
        window: int | None = None,
    ) -> tuple[Any, ...]:
        q, k, v = noise(3, 1, heads, 6), noise(3, 1, 2, 6), size * noise(3, 1, 2, 5)
        v[..., 0] += above
        keys, values = noise(3, 2, length + 3, 6), size * noise(3, 2, length + 3, 5)
        inverse = 0.5 + torch.rand(2, 5, generator=generator)
        shift = values[:, :, :length].amax(2, keepdim=True)
        data = torch.cat([values, (inverse[:, None] * (values - shift)).exp()], -1) if exponentials else values
        of_keys = None
        if segments:
            of_keys = (torch.arange(length) // 11).expand(3, -1).clone()
            of_keys[0, -3:-1] = of_keys[2, -1] = -1
        return (
            q,
            None if written else k,
            None if written else v,
            keys,
            data,
            shift,
            inverse if beta else None,
            noise(3, heads, 1, length) if bias else None,
            None if of_keys is None else of_keys[:, -1:],
            of_keys,
            length,
            window,
        )

    return {
        "whole cache": example(),
        "grouped": example(heads=6),
        "with exponentials": example(exponentials=True, heads=4),
        "mean": example(beta=False),
        "first token": example(length=1),
        "already written": example(written=True),
        "window": example(window=5),
        "bias and segments": example(bias=True, segments=True),
        "far apart": example(size=300.0),
        "beyond its exponentials": example(above=1e3, exponentials=True, heads=4),
        "padding beyond its exponentials": example(above=1e3, exponentials=True, segments=True),
    }
