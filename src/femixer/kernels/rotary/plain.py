"""Rotary positions in torch's operations."""

import torch
from torch import Tensor

# The rotation is linear, and the features show where it was positive.
READS_ARGUMENTS = ("cos", "sin")


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    found = zip((q, k), _rotated([q, k], cos, sin), strict=True)
    return tuple((y if floor is None else y.relu() + floor).to(x.dtype) for x, y in found)


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[None, None, Tensor, Tensor, float | None],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    _, _, cos, sin, floor = arguments
    seen = [(g, y) for g, y in zip(grads, results, strict=True) if g is not None]
    given = [g if floor is None else torch.ops.aten.threshold_backward(g, y, floor) for g, y in seen]
    found = iter(_rotated(given, cos, -sin))
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
    """Complex numbers lie at even places of the memory."""
    if any(step % 2 for step in (*pairs.stride()[:-1], pairs.storage_offset())):
        return pairs.clone(memory_format=torch.contiguous_format)
    return pairs
