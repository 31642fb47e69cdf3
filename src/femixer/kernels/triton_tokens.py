"""How Triton's scans along time see tensors [B, T, C]: as rows of channels, cut into chunks of tokens.

A program walks through several chunks of a few channels side by side, one token of each at a time. Scans take three
launches at any length: the summary of every chunk, what reaches each of them from those before, and the chunks again
from there. Chunks are about as many as tokens in one of them, so no chain of roundings is much longer than sqrt(T).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import HALF_OR_SINGLE, launch

# Tokens of the shortest chunk: up to here a sequence is a single one, which takes one launch.
SHORTEST = 8
# Chunks times channels that a program walks through side by side, and how many channels at most; its warps.
ELEMENTS, WIDEST, WARPS = 256, 64, 4
# The same for programs that hold all channels of a token, to sum over them: inside a warp that needs no memory.
WHOLE_ELEMENTS, WHOLE_WARPS = 64, 1
# Channels, of any sequences, for which a program walks through the summaries, and its warps.
LANES, FEW_WARPS = 32, 1
# What kernels take as numbers: nothing is compiled anew for others, with marks or without, or for what an encoder asks.
# A thread has one channel, so none gains by knowing what a step from a token to the next is a multiple of.
SIZES = ["length", "tokens", "count", "all_chunks", "channels", "lanes", "step", "key_step", "gate_step", "v_step"]
SIZES += ["marked", "by_log"]


def unserved(*tensors: Tensor | None) -> str | None:
    """Why these floating-point tensors are not served, or None."""
    kinds = sorted({str(x.dtype) for x in tensors if x is not None and x.dtype not in HALF_OR_SINGLE})
    return f"it takes float32, bfloat16 and float16, not {', '.join(kinds)}" if kinds else None


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, C] and the step from a token to the next, also from a sequence's last one to the next sequence's first:
    a copy only where there is no such step or channels are not side by side."""
    batch, length, channels = x.shape
    steps = x.stride()
    if channels > 1 and steps[2] != 1:
        return x.contiguous(), channels
    if length == 1:
        return (x, steps[0]) if batch > 1 else (x, channels)
    if batch > 1 and steps[0] != length * steps[1]:
        return x.contiguous(), channels
    return x, steps[1]


def empty_read(v: Tensor, free: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the mean of v in its type; the free energy, of shape `free`, and the log total in float32, because the
    backward takes exponentials of them. The mean only enters products there, as attention's result does."""
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    energy, log_total = (torch.empty(shape, dtype=torch.float32, device=v.device) for shape in (free, v.shape))
    return mean, energy, log_total


class Chunks:
    """The chunks of B sequences of T tokens with C channels, and launches over them."""

    def __init__(self, batch: int, length: int, channels: int) -> None:
        self.batch, self.channels = batch, channels
        tokens = SHORTEST
        while 4 * tokens * tokens < length:  # not a root: a compiler's trace has lengths that can only be compared
            tokens *= 2
        self.count = (length + tokens - 1) // tokens
        tokens = tokens if self.count > 1 else length
        # As kernels take them: tokens of a sequence, tokens of a chunk, chunks of a sequence and of all, channels.
        self.sizes = length, tokens, self.count, batch * self.count, channels

    def summaries(self, numbers: int, device: torch.device) -> Tensor:
        """Memory for some numbers per chunk and channel; none where a sequence is a single chunk."""
        count = self.count if self.count > 1 else 0
        return torch.empty(numbers, self.batch, count, self.channels, dtype=torch.float32, device=device)

    def walk(self, kernel: Any, *operands: Any, whole: bool = False, **options: Any) -> None:
        """Launch a kernel whose programs walk through the tokens of some chunks: see `tile_of`. whole: each of them
        holds all channels."""
        lanes = triton.next_power_of_2(self.channels)
        lanes = lanes if whole else min(WIDEST, lanes)
        group = max(1, (WHOLE_ELEMENTS if whole else ELEMENTS) // lanes)
        grid = triton.cdiv(self.batch * self.count, group), triton.cdiv(self.channels, lanes)
        warps = WHOLE_WARPS if whole else WARPS
        launch(kernel, grid, *operands, *self.sizes, GROUP=group, LANES=lanes, num_warps=warps, **options)

    def carry(self, kernel: Any, *operands: Any, **options: Any) -> None:
        """Launch a kernel whose programs walk through the summaries of all chunks: see `lanes_of`."""
        grid = (triton.cdiv(self.batch * self.channels, LANES),)
        sizes = self.count, self.batch * self.channels, self.channels
        launch(kernel, grid, *operands, *sizes, LANES=LANES, num_warps=FEW_WARPS, **options)


@triton.jit
def tile_of(tokens, count, all_chunks, channels, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Sequences and first tokens of a program's chunks [GROUP], its channels [LANES], which of both exist
    [GROUP, LANES], and their places in the numbers per chunk [B, chunks, C]."""
    chunk = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = (chunk < all_chunks)[:, None] & (channel < channels)[None, :]
    return chunk // count, chunk % count * tokens, channel, inside, chunk[:, None] * channels + channel[None, :]


@triton.jit
def lanes_of(count, lanes, channels, LANES: tl.constexpr):
    """Which of a program's channels exist, all [LANES], their places in [B, C], and those in the numbers of the first
    chunk [B, chunks, C]."""
    place = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    return place < lanes, place, place // channels * count * channels + place % channels
