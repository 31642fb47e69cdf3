"""Rotary positions: the pair (x_2i, x_2i+1) of a head's channels is rotated by the angle of pair i at its token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import declared


@declared(outputs=2, fusible=True)
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    """q [B, T, H, E] and k [B, T, G, E], rotated by angles whose cos and sin are [B or 1, T, E / 2]:

        y_2i = x_2i cos_i - x_2i+1 sin_i,   y_2i+1 = x_2i sin_i + x_2i+1 cos_i

    With a floor the results are the features max(y, 0) + floor. They have the types of q and k and are computed in the
    type of cos and sin, which have no gradients.
    """
    return q.new_empty(q.shape), k.new_empty(k.shape)


OPERATOR = rotate.operator


# The rotation is linear, and the features show where it was positive.
READS_ARGUMENTS = ("cos", "sin")


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    """In torch's operations."""
    if floor is None:
        return tuple(y.to(q.dtype) for y in _rotated([q, k], cos, sin))
    # Features side by side, and in memory head by head, as products of matrices take them.
    (y,) = _rotated([torch.cat([q.transpose(1, 2), k.transpose(1, 2)], 1).transpose(1, 2)], cos, sin)
    return (y.relu() + floor).to(q.dtype).split([q.shape[2], k.shape[2]], 2)


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[None, None, Tensor, Tensor, float | None],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    _, _, cos, sin, floor = arguments
    seen = [(g, y) for g, y in zip(grads, results, strict=True) if g is not None]
    given, heads = [g for g, _ in seen], seen[0][0].shape[2]
    if floor is not None:
        given = [torch.cat([torch.ops.aten.threshold_backward(g, y, floor) for g, y in seen], 2)]
    found = (part for both in _rotated(given, cos, -sin) for part in both.split(heads, 2))
    return *(None if g is None else next(found).to(g.dtype) for g in grads), None, None


def _rotated(heads: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """In the type of cos and sin."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    pairs = [x.to(cos.dtype).unflatten(-1, (-1, 2)) for x in heads]
    if not _knows_complex(heads):
        parts = [x.unbind(-1) for x in pairs]
        return [torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2) for a, b in parts]
    # One product each, in one pass over memory.
    rotation = torch.complex(cos, sin)
    return [torch.view_as_real(torch.view_as_complex(_even(x)) * rotation).flatten(-2) for x in pairs]


def _knows_complex(heads: list[Tensor]) -> bool:
    """Compilers and transforms do not, nor do all kinds of tensors; they fuse the real form, or spread it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in heads)


def _even(pairs: Tensor) -> Tensor:
    """Complex numbers lie at even places of the memory, side by side."""
    if pairs.stride(-1) != 1 or any(step % 2 for step in (*pairs.stride()[:-1], pairs.storage_offset())):
        return pairs.clone(memory_format=torch.contiguous_format)
    return pairs


def definition(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    """The formula in float64."""
    c, s = (x.detach().double()[:, :, None] for x in (cos, sin))  # [B or 1, T, 1, E / 2]
    found = []
    for x in (q, k):
        a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
        found.append(y if floor is None else y.relu() + floor)
    return tuple(found)


def examples() -> dict[str, tuple[Any, ...]]:
    """q and k lie side by side, in front of something else, as columns of a projection."""
    torch.manual_seed(0)
    found: dict[str, tuple[Any, ...]] = {}
    shapes = {"grouped": (2, 13, 3, 1, 10), "one token": (3, 1, 5, 5, 6), "many tokens": (1, 67, 2, 2, 2)}
    for name, (batch, length, heads, groups, width) in shapes.items():
        columns = torch.randn(batch, length, (heads + groups) * width + 3)
        q, k, _ = columns.split([heads * width, groups * width, 3], -1)
        angle = 100 * torch.rand(batch, length, width // 2)
        given = q.unflatten(-1, (heads, width)), k.unflatten(-1, (groups, width)), angle.cos(), angle.sin()
        found |= {name: (*given, None), f"{name}, features": (*given, 1e-3)}
    q, k, cos, sin, _ = found["grouped"]
    found["same positions"] = (q, k, cos[:1], sin[:1], None)
    found["no token"] = (q[:, :0], k[:, :0], cos[:, :0], sin[:, :0], 1e-3)
    return found
