"""Rotary positions: a rotation of each pair of channels by an angle proportional to the position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.kernels.backend import native, one_token


def check_base(rope_base: float) -> None:
    if isinstance(rope_base, bool) or not isinstance(rope_base, (int, float)) or not 0 < rope_base < math.inf:
        raise ValueError(f"rope_base={rope_base!r} must be a positive number")


def rotated(
    q: Tensor, k: Tensor, position: Tensor, width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q [B, T, H E] and k [B, T, G E] at their positions [B or 1, T], as heads [B, T, H, E] and [B, T, G, E].

    Rotated in float32 at least, returned in `dtype`.
    """
    if dtype == torch.float32 and one_token(q):
        return _rotate_token(q, position, width, base), _rotate_token(k, position, width, base)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = rotary_angles(position, width, base, wide)
    return tuple(rotate(x.unflatten(-1, (-1, width)).to(wide), cos, sin).to(dtype) for x in (q, k))  # type: ignore[return-value]


def _rotate_token(x: Tensor, position: Tensor, width: int, base: float) -> Tensor:
    batch, heads = x.shape[0], x.shape[2] // width
    out = x.new_empty(batch, 1, heads, width)
    rows = x.contiguous().view(batch, -1).numpy()
    native("token").rotate(rows, heads, position.numpy(), base, out.view(batch, heads, width).numpy())
    return out


def rotary_angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, 1, width/2] for positions [..., T].

    The angles are float64: float32 ones are off by 2e-4 at position 16383 and by 0.02 at a million.
    """
    # A compiler that sees inside fuses the sines into the rotation and computes them again for every head.
    return (_opaque if torch.compiler.is_compiling() else _angles)(position, width, base, dtype)


def _angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width
    angle = position[..., None, None].to(torch.float64) * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


@torch.library.custom_op("femixer::rotary_angles", mutates_args=())
def _opaque(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _angles(position, width, base, dtype)


@_opaque.register_fake
def _(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*position.shape, 1, width // 2)
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, E]: channels (2i, 2i + 1) are rotated as pair i, so scores depend on the distance only."""
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # a compiler fuses the real form and knows no complex numbers
        a, b = pairs.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    if any(step % 2 for step in (*pairs.stride()[:-1], pairs.storage_offset())):
        pairs = pairs.contiguous()  # complex numbers lie at even places
    # One complex product; several times faster than the real form written out.
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2)
