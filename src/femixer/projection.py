"""Projections of the tokens, side by side in one matrix product, modulated by the conditioner's features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import array, eager_kernels, native, one_token
from femixer.kernels.function import run
from femixer.kernels.precision import without_autocast
from femixer.rotary import Turn, modulate_and_turn

# Numbers modulated at a time: enough for a matrix product to be fast, and their eta stays in the cache.
NUMBERS = 2**20
# Up to this many features modulation is a compiled kernel: products with so narrow a matrix cost more.
FEW = 8
# Rows whose gradients of the matrix this kernel sums up before their sums are.
ROWS = 512


class Columns(NamedTuple):
    """Columns of a projection. The conditioner multiplies them by 1 + eta or, for logits of decays and steps
    (`additive`), adds eta."""

    width: int
    additive: bool = False


class Projection(nn.Module):
    """x [B, T, dim] -> {name: x W + b} [B, T, width] each, modulated by eta = features M; M starts at zero."""

    def __init__(
        self,
        dim: int,
        columns: dict[str, Columns],
        bias: bool,
        conditioner_channels: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Additive columns come last, so that both kinds are one stretch.
        self.columns = dict(sorted(columns.items(), key=lambda item: item[1].additive))
        self.scaled = sum(c.width for c in columns.values() if not c.additive)
        total = sum(c.width for c in columns.values())
        self.linear = nn.Linear(dim, total, bias=bias, device=device, dtype=dtype)
        self.modulation: nn.Parameter | None = None
        if conditioner_channels:
            self.modulation = nn.Parameter(torch.empty(total, conditioner_channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.linear.weight, std=0.02)
        if self.linear.bias is not None:
            nn.init.zeros_(self.linear.bias)
        if self.modulation is not None:
            nn.init.zeros_(self.modulation)

    def forward(self, x: Tensor, features: Tensor | None = None, turn: Turn | None = None) -> dict[str, Tensor]:
        """With `turn`, columns that are not additive may come as heads [B, T, heads, E] that are turned already."""
        projected, widths = self.linear(x), [c.width for c in self.columns.values()]
        if self.linear._forward_hooks or type(self.linear) is not nn.Linear:
            projected = projected.clone()  # what is modulated in place below may be kept by others
        if self.modulation is not None:
            assert features is not None
            if projected.dtype == self.modulation.dtype == features.dtype and one_token(projected):
                rows = (projected.view(x.shape[0], -1), features.view(x.shape[0], -1), self.modulation.detach())
                native("token").modulate(*(r.numpy() for r in rows), self.scaled)
            elif torch.is_grad_enabled():
                pieces = run(Modulate, projected, features, self.modulation, self.scaled, widths)
                return dict(zip(self.columns, pieces, strict=True))
            elif turn is not None and eager_kernels(projected) and not few(projected, features):
                modulate_and_turn(projected, _etas(features.flatten(0, 1), self.modulation), self.scaled, turn)
                pieces = zip(self.columns.items(), projected.split(widths, -1), strict=True)
                return {
                    name: piece if columns.additive else piece.unflatten(-1, (-1, turn.width))
                    for (name, columns), piece in pieces
                }
            else:
                projected = modulate(projected, features, self.modulation, self.scaled, out=projected)
        return dict(zip(self.columns, projected.split(widths, -1), strict=True))


def modulate(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, out: Tensor) -> Tensor:
    """x * (1 + f Mᵀ) in the first `scaled` columns, x + f Mᵀ in the others, without ever storing eta = f Mᵀ whole."""
    with without_autocast(x.device):
        f, m = features.flatten(0, -2).to(x.dtype), matrix.to(x.dtype)
        if torch.compiler.is_compiling():  # a compiler chooses itself what to store
            eta = (f @ m.mT).view_as(x)
            return torch.cat([x[..., :scaled] * (1 + eta[..., :scaled]), x[..., scaled:] + eta[..., scaled:]], -1)
        rows, y = x.flatten(0, -2), out.flatten(0, -2)
        if few(x, f):
            inputs = (x.contiguous() for x in (rows, f, m.mT))
            native("modulation").forward(*map(array, inputs), scaled, array(y))
            return out
        for at, eta in _etas(f, m):
            here = rows[at]
            torch.addcmul(here[:, :scaled], here[:, :scaled], eta[:, :scaled], out=y[at, :scaled])
            if scaled < m.shape[0]:
                torch.add(here[:, scaled:], eta[:, scaled:], out=y[at, scaled:])
        return out


class Modulate(torch.autograd.Function):
    """`modulate`, cut into pieces of some widths, with a backward that makes eta again."""

    @staticmethod
    def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
        return modulate(x, features, matrix, scaled, out=torch.empty_like(x)).split(widths, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, features, matrix, ctx.scaled, ctx.widths = inputs
        ctx.save_for_backward(x, features, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, features, matrix = ctx.saved_tensors
        scaled = ctx.scaled
        rows, f, m = x.flatten(0, -2), features.flatten(0, -2).to(x.dtype), matrix.to(x.dtype)
        pieces = [g.flatten(0, -2) for g in grads]
        with without_autocast(x.device):
            if few(x, f):
                dx, df, dm = _few_backward(pieces, rows, f, m, scaled)
            elif torch.compiler.is_compiling():
                g, eta = torch.cat(pieces, -1), f @ m.mT
                dx = torch.cat([g[:, :scaled] * (1 + eta[:, :scaled]), g[:, scaled:]], -1)
                to_eta = torch.cat([g[:, :scaled] * rows[:, :scaled], g[:, scaled:]], -1)
                df, dm = to_eta @ m, to_eta.mT @ f
            else:
                dx, df, dm = torch.empty_like(rows), torch.empty_like(f), torch.zeros_like(m)
                ends = list(itertools.accumulate(ctx.widths))
                for at, eta in _etas(f, m):
                    for g, width, end in zip(pieces, ctx.widths, ends, strict=True):
                        columns, g = slice(end - width, end), g[at]
                        if end <= scaled:
                            torch.addcmul(g, g, eta[:, columns], out=dx[at, columns])
                            torch.mul(g, rows[at, columns], out=eta[:, columns])
                        else:
                            dx[at, columns] = eta[:, columns] = g
                    torch.mm(eta, m, out=df[at])
                    dm.addmm_(eta.mT, f[at])
        return dx.view_as(x), df.view_as(features).to(features.dtype), dm.to(matrix.dtype), None, None


def _etas(f: Tensor, m: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Stretches of rows and their eta = f mᵀ, one after the other in the same memory."""
    step = max(1, NUMBERS // max(1, m.shape[0]))
    memory = f.new_empty(min(step, f.shape[0]), m.shape[0])
    for start in range(0, f.shape[0], step):
        at = slice(start, min(start + step, f.shape[0]))
        yield at, torch.mm(f[at], m.mT, out=memory[: at.stop - start])


def few(x: Tensor, features: Tensor) -> bool:
    return 0 < features.shape[-1] <= FEW and eager_kernels(x)


def _few_backward(
    grads: list[Tensor], rows: Tensor, features: Tensor, matrix: Tensor, scaled: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows [n, width], features [n, C] and matrix [width, C]."""
    tasks = -(-rows.shape[0] // ROWS)
    dx, df = torch.empty_like(rows), torch.empty_like(features)
    dm = rows.new_empty(tasks, features.shape[1], rows.shape[1])
    pieces = tuple(array(g.contiguous()) for g in grads)
    inputs = (x.contiguous() for x in (rows, features, matrix.mT))
    native("modulation").backward(pieces, *map(array, inputs), scaled, *map(array, (dx, df, dm)))
    return dx, df, dm.sum(0).mT
