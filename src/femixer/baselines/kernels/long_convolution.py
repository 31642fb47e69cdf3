"""Causal convolution per channel with a filter as long as the sequence: y_t = sum_{i<=t} filter[t-i] u_i.

Short distances are products with a Toeplitz matrix; longer ones are convolutions by FFT from one half of a block to the
other, over blocks of 2, 4, 8, ... chunks. So no future token takes part in what a token reads, not even with its
rounding error, as it would in one FFT over the whole sequence; the cost is O(T log² T).

Axes: B batch, S tokens, C channels; R rows of N chunks of K tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.operator import without_autocast

CHUNK = 64  # tokens whose convolution is a matrix product, at most


def long_convolution(u: Tensor, kernel: Tensor, segment: Tensor | None, last: bool = False) -> Tensor:
    """y [B, S, C] in float32 at least; last: only that of the last token, [B, 1, C].

    u [B, S, C]; kernel [S, C]; segment [B, S]: number of the token's segment, -1 for padding, which is as if it was not
    there. Tokens of other segments have no say.
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    u, kernel = u.to(dtype), kernel.to(dtype)
    with without_autocast(u.device):
        return _last(u, kernel, segment) if last else _convolution(u, kernel, segment)


def _last(u: Tensor, kernel: Tensor, segment: Tensor | None) -> Tensor:
    if segment is None:
        return (u * kernel.flip(0)).sum(1, keepdim=True)
    real = segment >= 0
    rank = real.cumsum(1)
    weight = kernel[rank[:, -1:] - rank].masked_fill(~(real & (segment == segment[:, -1:]))[..., None], 0)
    return (weight * u).sum(1, keepdim=True)


class Rows(NamedTuple):
    """Segments of similar length side by side: the tokens of [B S] among them, the place of each in [rows * length]."""

    token: Tensor
    place: Tensor
    rows: int
    length: int

    def lay(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [rows, length, C], zero behind the end of a segment."""
        out = x.new_zeros(self.rows * self.length, x.shape[-1])
        out[self.place] = x.flatten(0, 1)[self.token]
        return out.view(self.rows, self.length, -1)

    def put(self, x: Tensor, into: Tensor) -> None:
        """The transpose of `lay`."""
        into.view(-1, into.shape[-1])[self.token] = x.flatten(0, 1)[self.place]


def _segments(segment: Tensor) -> Iterator[Rows]:
    """The segments in segment [B, S], those whose length has the same power of two together: at most half is zeros."""
    real = segment >= 0
    before = F.pad(segment.cummax(1).values[:, :-1], (1, 0), value=-1)
    start = (real & (segment != before)).flatten()
    row, rank = start.cumsum(0) - 1, real.flatten().cumsum(0) - 1
    column = rank - rank.masked_fill(~start, 0).cummax(0).values
    lengths = torch.bincount(row[real.flatten()])
    for power in range(segment.shape[1].bit_length()):
        chosen = (lengths >= 2**power) & (lengths < 2 ** (power + 1))
        rows = int(chosen.sum())
        if rows == 0:
            continue
        token = (real.flatten() & chosen[row.clamp(min=0)]).nonzero()[:, 0]
        length = int(lengths[chosen].max())
        place = (chosen.cumsum(0) - 1)[row[token]] * length + column[token]
        yield Rows(token, place, rows, length)


class Chunked(NamedTuple):
    """Values [C, R, N, K] with N a power of two, zero behind the last of `length` tokens."""

    values: Tensor
    length: int

    @classmethod
    def of(cls, x: Tensor) -> Chunked:
        """x [R, length, C]"""
        length = x.shape[1]
        number = 1 << max(0, -(-length // CHUNK) - 1).bit_length()
        chunk = -(-length // number)
        padded = F.pad(x.permute(2, 0, 1), (0, number * chunk - length))
        return cls(padded.unflatten(-1, (number, chunk)).contiguous(), length)

    def tokens(self) -> Tensor:
        """[R, length, C]"""
        return self.values.flatten(2)[..., : self.length].permute(1, 2, 0)

    def halves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(first, second) halves [C, R, blocks, half] of blocks of 2, 4, 8, ... chunks, as views."""
        number, chunk = self.values.shape[2:]
        size = 1
        while size < number:
            blocks = self.values.view(*self.values.shape[:2], -1, 2, size * chunk)
            yield blocks[..., 0, :], blocks[..., 1, :]
            size *= 2


def _toeplitz(kernel: Tensor) -> Tensor:
    """[C, K] -> [C, K, K]: row i, column t holds kernel[t - i], zero below the diagonal."""
    index = torch.arange(kernel.shape[1], device=kernel.device)
    return kernel[:, (index - index[:, None]).clamp(min=0)].triu()


def _diagonals(matrix: Tensor) -> Tensor:
    """The transpose of `_toeplitz`: [C, K, K] -> [C, K]"""
    index = torch.arange(matrix.shape[1], device=matrix.device)
    place = (index - index[:, None]).clamp(min=0).flatten()
    return matrix.new_zeros(matrix.shape[:2]).index_add_(1, place, matrix.triu().flatten(1))


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    """u [R, L, C], kernel [L, C] -> y [R, L, C]"""
    x, h = Chunked.of(u), Chunked.of(kernel[None]).values.flatten(1)
    chunk = x.values.shape[-1]
    y = x._replace(values=(x.values.flatten(1, 2) @ _toeplitz(h[:, :chunk])).view_as(x.values))
    for (first, _), (_, second) in zip(x.halves(), y.halves(), strict=True):
        half = first.shape[-1]
        spectrum = torch.fft.rfft(first, 2 * half) * torch.fft.rfft(h[:, None, None, : 2 * half])
        second += torch.fft.irfft(spectrum, 2 * half)[..., half:]
    return y.tokens()


def _gradients(to_y: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of u [R, L, C] and kernel [L, C]: the transposes of the products in `_forward`."""
    x, g, h = Chunked.of(u), Chunked.of(to_y), Chunked.of(kernel[None]).values.flatten(1)
    chunk = x.values.shape[-1]
    flat_x, flat_g = x.values.flatten(1, 2), g.values.flatten(1, 2)
    d_x = x._replace(values=(flat_g @ _toeplitz(h[:, :chunk]).mT).view_as(x.values))
    d_h = torch.zeros_like(h)
    d_h[:, :chunk] = _diagonals(flat_x.mT @ flat_g)
    for (first, _), (_, to_second), (d_first, _) in zip(x.halves(), g.halves(), d_x.halves(), strict=True):
        half = first.shape[-1]
        spectrum = torch.fft.rfft(F.pad(to_second, (half, 0)))
        to_h = (spectrum * torch.fft.rfft(first, 2 * half).conj()).sum((1, 2))
        d_h[:, : 2 * half] += torch.fft.irfft(to_h, 2 * half)
        spectrum *= torch.fft.rfft(h[:, None, None, : 2 * half]).conj()
        d_first += torch.fft.irfft(spectrum, 2 * half)[..., :half]
    return d_x.tokens(), d_h[:, : x.length].mT


@torch.library.custom_op("femixer::long_convolution", mutates_args=())
def _convolution(u: Tensor, kernel: Tensor, segment: Tensor | None) -> Tensor:
    if segment is None:
        return _forward(u, kernel).contiguous()
    y = torch.zeros_like(u, memory_format=torch.contiguous_format)
    for rows in _segments(segment):
        rows.put(_forward(rows.lay(u), kernel[: rows.length]), y)
    return y


@_convolution.register_fake
def _(u: Tensor, kernel: Tensor, segment: Tensor | None) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op("femixer::long_convolution_backward", mutates_args=())
def _convolution_backward(to_y: Tensor, u: Tensor, kernel: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
    if segment is None:
        d_u, d_kernel = _gradients(to_y, u, kernel)
        return d_u.contiguous(), d_kernel.contiguous()
    d_u, d_kernel = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (u, kernel))
    for rows in _segments(segment):
        to_u, to_kernel = _gradients(rows.lay(to_y), rows.lay(u), kernel[: rows.length])
        rows.put(to_u, d_u)
        d_kernel[: rows.length] += to_kernel
    return d_u, d_kernel


@_convolution_backward.register_fake
def _(to_y: Tensor, u: Tensor, kernel: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, kernel))  # type: ignore[return-value]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, to_y):  # type: ignore[no-untyped-def]
    return *_convolution_backward(to_y, *ctx.saved_tensors), None


_convolution.register_autograd(_backward, setup_context=_setup)
