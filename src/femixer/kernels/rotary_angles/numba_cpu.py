"""The angles of single tokens, as in decoding, without torch's dozen small calls; those of the last ones are kept,
because the layers of a model ask for the same."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from femixer.kernels.numba_kernel import array, job
from femixer.kernels.rotary_angles import plain

# Sines of more angles than these are faster in torch, which computes several at once.
ANGLES = 512


def refuse(position: Tensor, width: int, base: float, dtype: torch.dtype) -> str | None:
    if position.dtype != torch.int64 or dtype != torch.float32:
        return f"it makes float32 of int64, not {dtype} of {position.dtype}"
    return None


def forward(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if position.numel() * width > 2 * ANGLES:
        return plain.forward(position, width, base, dtype)
    return _kept(position.shape, tuple(position.flatten().tolist()), width, base)


@functools.lru_cache(maxsize=256)
def _kept(shape: torch.Size, positions: tuple[int, ...], width: int, base: float) -> tuple[Tensor, ...]:
    # Made inside inference mode, they could not be kept for gradients later.
    with torch.inference_mode(False):
        cos, sin = torch.empty(2, *shape, width // 2, dtype=torch.float32, device="cpu")
    _angles(np.array(positions, dtype=np.int64), base, array(cos), array(sin))
    return cos, sin


@job
def _angles(position, base, cos, sin):  # type: ignore[no-untyped-def]
    """position [n]; cos, sin [..., width / 2], of n positions."""
    pairs, c, s = cos.shape[-1], cos.reshape(-1), sin.reshape(-1)
    for n in range(position.size):
        for i in range(pairs):
            angle = position[n] * base ** (-float(i) / pairs)
            c[n * pairs + i], s[n * pairs + i] = math.cos(angle), math.sin(angle)
