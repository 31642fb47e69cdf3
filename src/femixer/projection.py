"""Projections of the tokens, side by side in few matrix products, modulated by the conditioner's features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as modules

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
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
        total = sum(self.widths)
        self.linear = nn.Linear(dim, total, bias=bias, device=device, dtype=dtype)
        self.modulation: nn.Parameter | None = None
        if conditioner_channels:
            self.modulation = nn.Parameter(torch.empty(total, conditioner_channels, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def widths(self) -> list[int]:
        return [c.width for c in self.columns.values()]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.linear.weight, std=0.02)
        if self.linear.bias is not None:
            nn.init.zeros_(self.linear.bias)
        if self.modulation is not None:
            nn.init.zeros_(self.modulation)

    def forward(self, x: Tensor, features: Tensor | None = None, turn: Turn | None = None) -> dict[str, Tensor]:
        """With `turn`, columns that are not additive may come as heads [B, T, heads, E] that are turned already."""
        projected = self.linear(x)
        if self.linear._forward_hooks or type(self.linear) is not nn.Linear:
            projected = projected.clone()  # what is modulated in place below may be kept by others
        if self.modulation is not None:
            assert features is not None
            if projected.dtype == self.modulation.dtype == features.dtype and one_token(projected):
                rows = (projected.view(x.shape[0], -1), features.view(x.shape[0], -1), self.modulation.detach())
                native("token").modulate(*(r.numpy() for r in rows), self.scaled)
            elif torch.is_grad_enabled():
                pieces = run(Modulate, projected, features, self.modulation, self.scaled, self.widths)
                return dict(zip(self.columns, pieces, strict=True))
            elif turn is not None and eager_kernels(projected) and not few(projected, features):
                modulate_and_turn(projected, _etas(features.flatten(0, 1), self.modulation), self.scaled, turn)
                pieces = zip(self.columns.items(), projected.split(self.widths, -1), strict=True)
                return {
                    name: piece if columns.additive else piece.unflatten(-1, (-1, turn.width))
                    for (name, columns), piece in pieces
                }
            else:
                projected = modulate(projected, features, self.modulation, self.scaled, out=projected)
        return dict(zip(self.columns, projected.split(self.widths, -1), strict=True))


def _is_plain(projection: nn.Module, x: Tensor) -> bool:
    """Whether x meets nothing there but the parameters as they are: no hooks, no adapters, no casts."""
    if type(projection) is not Projection or type(projection.linear) is not nn.Linear:
        return False
    linear, matrix = projection.linear, projection.modulation
    for weight in (linear.weight, linear.bias, matrix):
        if weight is not None and weight.dtype != x.dtype:
            return False
    if matrix is None or modules._has_any_global_hook() or torch.is_autocast_enabled(x.device.type):
        return False
    return not any("forward" in m.__dict__ or any(m.__dict__[name] for name in HOOKS) for m in (projection, linear))


def project(
    x: Tensor, features: Tensor | None, prior: Projection | None, value: Projection, turn: Turn | None, size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both projections of x [B, T, dim], by name; the prior's may be turned already, the values are heads of some size,
    [B, T, heads, size]."""
    both = [value] if prior is None else [value, prior]  # additive columns, of which the values have none, come last
    trained = features is not None and torch.is_grad_enabled() and few(x, features)
    if trained and all(_is_plain(each, x) for each in both):
        weights = (w for each in both for w in (each.linear.weight, each.linear.bias, each.modulation))
        sizes = [(-1, size)] * len(value.widths) + [(-1,)] * (0 if prior is None else len(prior.widths))
        widths = [width for each in both for width in each.widths]
        *pieces, _ = run(Project, x, features, sum(each.scaled for each in both), widths, sizes, *weights)
        named = zip((name for each in both for name in each.columns), pieces, strict=True)
        values = dict(itertools.islice(named, len(value.columns)))
        return dict(named), values
    inputs = {} if prior is None else prior(x, features, turn)
    return inputs, {name: piece.unflatten(-1, (-1, size)) for name, piece in value(x, features).items()}


class Project(torch.autograd.Function):
    """Several projections of x, side by side and modulated by few features in place: pieces of some widths of

        y = (x W + b) (1 + eta),   or x W + b + eta in the columns after the first `scaled`

    For the gradient of eta, x W + b is y / (1 + eta) again. That has all its digits, because 1 + eta is made no smaller
    than its own rounding (see the kernels); it saves keeping, and fetching, a second tensor of the size of y.
    """

    @staticmethod
    def forward(
        x: Tensor,
        features: Tensor,
        scaled: int,
        widths: list[int],
        sizes: list[tuple[int, ...]],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """sizes: the last dimensions of each piece; weights: W, b or None, and M of each projection.

        -> the pieces, and last the matrices M as the kernels read them, side by side [C, all widths].
        """
        rows, y, start = x.flatten(0, -2), x.new_empty(*x.shape[:-1], sum(widths)), 0
        flat = y.view(-1, y.shape[-1])
        for weight, bias in zip(weights[::3], weights[1::3], strict=True):
            assert weight is not None
            into = flat[:, start : start + weight.shape[0]]
            if bias is None:
                torch.mm(rows, weight.mT, out=into)
            else:
                torch.addmm(bias, rows, weight.mT, out=into)
            start += weight.shape[0]
        m = torch.cat([matrix for matrix in weights[2::3] if matrix is not None]).mT.contiguous()
        native("modulation").forward(*map(array, (flat, _few_rows(features), m, flat)), scaled)
        return *(piece.unflatten(-1, size) for piece, size in zip(y.split(widths, -1), sizes, strict=True)), m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, features, ctx.scaled, _, _, *weights = inputs
        ctx.save_for_backward(x, features, output[-1], *output[:-1], *weights)
        ctx.mark_non_differentiable(output[-1])
        ctx.pieces = len(output) - 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, features, m, *rest = ctx.saved_tensors
        pieces, weights = rest[: ctx.pieces], rest[ctx.pieces :]
        rows, f = x.flatten(0, -2), _few_rows(features)
        y = _whole(pieces, m.shape[1])
        dy, df = torch.empty_like(y), torch.empty_like(f)
        dm = y.new_empty(-(-y.shape[0] // ROWS), *m.shape)
        given = tuple(array(g.contiguous().view(len(rows), -1)) for g in grads[:-1])
        native("modulation").backward(given, *map(array, (y, f, m)), ctx.scaled, *map(array, (dy, df, dm)))
        dx, db, dm, start, results = None, dy.sum(0), dm.sum(0).mT, 0, []
        needed = ctx.needs_input_grad
        with without_autocast(x.device):
            for n, weight in enumerate(weights[::3]):
                columns = slice(start, start + weight.shape[0])
                here, start = dy[:, columns], columns.stop
                if needed[0]:
                    dx = here @ weight if dx is None else dx.addmm_(here, weight)
                to_weight = here.mT @ rows if needed[5 + 3 * n] else None
                results += [to_weight, db[columns] if needed[6 + 3 * n] else None, dm[columns]]
        return None if dx is None else dx.view(x.shape), df.view(features.shape), None, None, None, *results


def _few_rows(features: Tensor) -> Tensor:
    return features.flatten(0, -2).contiguous()


def _whole(pieces: list[Tensor], width: int) -> Tensor:
    """The tensor [n, width] that was split into pieces [B, T, ...], without a copy where they are still parts of it."""
    first, last = pieces[0], pieces[-1]
    (batch, length), at = first.shape[:2], first.data_ptr()
    parts = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    for piece in pieces:
        parts = parts and piece.data_ptr() == at and piece.stride()[:2] == (length * width, width)
        at += math.prod(piece.shape[2:]) * piece.element_size()
    if parts:
        return first.as_strided((batch * length, width), (width, 1))
    return torch.cat([piece.flatten(2) for piece in pieces], 2).flatten(0, 1)


def modulate(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, out: Tensor) -> Tensor:
    """x * (1 + f Mᵀ) in the first `scaled` columns, x + f Mᵀ in the others, without ever storing eta = f Mᵀ whole."""
    with without_autocast(x.device):
        f, m = features.flatten(0, -2).to(x.dtype), matrix.to(x.dtype)
        if torch.compiler.is_compiling():  # a compiler chooses itself what to store
            eta = (f @ m.mT).view_as(x)
            return torch.cat([x[..., :scaled] * (1 + eta[..., :scaled]), x[..., scaled:] + eta[..., scaled:]], -1)
        rows, y = x.flatten(0, -2), out.flatten(0, -2)
        if few(x, f):
            inputs = (rows.contiguous(), f.contiguous(), m.mT.contiguous(), y)
            native("modulation").forward(*map(array, inputs), scaled)
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
            if torch.compiler.is_compiling():
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
