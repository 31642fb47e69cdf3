"""Time-decay conditioner (paper appendix "Low-rank Convolution", part C): local context for prior and gates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import array, eager_kernels, native, one_token, or_empty, rows
from femixer.kernels.function import run
from femixer.kernels.precision import without_autocast
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import Layout

EPS = 1e-5
# Up to this many outputs LN(x) Wᵀ is a compiled kernel, whose gradients of W are summed over so many rows at a time.
FEW, ROWS = 24, 512
# Numbers that are normalized at a time, where there are more outputs.
NUMBERS = 2**20
SHORTEST_SPAN, LONGEST_SPAN = 2.0, 1000.0
_NONE = np.empty((0, 0), dtype=np.float32)


def memory_spans(count: int) -> Tensor:
    """Numbers of tokens, spread evenly in log from 2 to 1000, float64."""
    return torch.logspace(math.log10(SHORTEST_SPAN), math.log10(LONGEST_SPAN), count, dtype=torch.float64)


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def spread_decay_(bias: Tensor) -> Tensor:
    """Fill a bias b so that softplus(b) = 1 / span with spans spread evenly in log from 2 to 1000 tokens."""
    with torch.no_grad():
        return bias.copy_(inverse_softplus(1 / memory_spans(bias.numel())).view_as(bias))


class TimeDecayConditioner(nn.Module):
    """SiLU(a_t / |a_t|) * LN(h_t), with h_t = sum_{i<=t} exp(-sum_{tau=i+1..t} s_tau) u_i: C features per token.

    s = softplus(LN(x) W_f + b), u = LN(x) W_x, a = softplus(LN(x) W_s). Encoder mode adds the same sum over later
    tokens, with the gates t..i-1. The projections map the features to what they modulate (femixer.projection).
    """

    def __init__(
        self,
        dim: int,
        channels: int,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.channels, self.causal = dim, channels, causal
        self.in_proj = nn.Linear(dim, 3 * channels, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.in_proj.weight, std=0.02)
        nn.init.zeros_(self.in_proj.bias)
        spread_decay_(self.in_proj.bias[: self.channels])

    def forward(self, x: Tensor, layout: Layout, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, dim], state [B, C] -> (features [B, T, C], state after the last token)."""
        if state is not None and layout.run is None and self.in_proj.weight.dtype == x.dtype and one_token(x):
            return self._token(x, state)
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            x, weight, bias = x.to(wide), self.in_proj.weight.to(wide), self.in_proj.bias.to(wide)
            if state is None:
                state = x.new_zeros(x.shape[0], self.channels)
            elif not torch.compiler.is_compiling() and state.is_inference() and torch.is_grad_enabled():
                state = state.clone()  # autograd keeps no tensor that was made in inference mode
            if eager_kernels(x):
                features, new_state, _ = run(Features, x, weight, bias, _marks(layout), state, self.causal)
                return features, new_state
            s, u, a = run(NormalizedLinear, x, weight, bias).chunk(3, -1)
            h = context(torch.sigmoid(-s), u, layout, state, self.causal)  # exp(-softplus(s))
            # Not a view, which would keep the whole sequence in memory.
            new_state = h[:, -1].clone() if h.shape[1] else state
            features = F.silu(F.normalize(F.softplus(a), dim=-1)) * F.layer_norm(h, (self.channels,), eps=EPS)
        return features, new_state

    def _token(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same for x [B, 1, dim], as one compiled kernel."""
        features, new_state = x.new_empty(x.shape[0], 1, self.channels), torch.empty_like(state)
        weight, bias = self.in_proj.weight.detach(), self.in_proj.bias.detach()
        rows = (x.contiguous().view(x.shape[0], -1), weight, bias, state.contiguous())
        native("token").condition(*(r.numpy() for r in rows), EPS, features[:, 0].numpy(), new_state.numpy())
        return features, new_state


def _marks(layout: Layout) -> Tensor | None:
    """int8 [B, T] as the compiled kernel reads them."""
    if layout.padding is None or layout.starts is None:
        return None
    marks = layout.starts.to(torch.int8) + 4 * layout.padding.to(torch.int8)
    return marks if layout.ends is None else marks + 2 * layout.ends.to(torch.int8)


class Features(torch.autograd.Function):
    """From the tokens x to the features and the state after the last token, and y = LN(x) Wᵀ + b = [s, u, a] between,
    as compiled kernels: dozens of operations on so few channels are mostly calls."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, marks: Tensor | None, initial: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        few = weight.shape[0] <= FEW
        y = x.new_empty(*x.shape[:2], weight.shape[0]) if few else normalized_linear(x, weight, bias)
        features, last = y.new_empty(*y.shape[:2], initial.shape[1]), torch.empty_like(initial)
        given = (
            rows(x),
            array(weight) if few else _NONE,
            array(bias),
            array(or_empty(marks)),
            array(initial.contiguous()),
        )
        native("conditioner").forward(*given, causal, EPS, *map(array, (y, features, last)))
        return features, last, y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, marks, initial, ctx.causal = inputs
        ctx.save_for_backward(x, weight, marks, initial, output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, to_last: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, marks, initial, y = ctx.saved_tensors
        few = weight.shape[0] <= FEW
        to_y, to_initial = y.new_empty(y.shape), y.new_empty(initial.shape)
        to_x = x.new_empty(x.shape if few else (0, 1))
        to_weight = y.new_empty(-(-y.shape[0] * y.shape[1] // ROWS) if few else 0, *weight.shape)
        inputs = (grad.contiguous(), to_last.contiguous(), y, or_empty(marks), initial.contiguous())
        given = *map(array, inputs), ctx.causal, EPS, rows(x), array(weight) if few else _NONE
        native("conditioner").backward(*given, array(to_y), array(to_initial), rows(to_x), array(to_weight))
        if not few:
            return *normalized_linear_gradients(to_y, x, weight), None, to_initial, None
        return to_x, to_weight.sum(0), to_y.sum((0, 1)), None, to_initial, None


class NormalizedLinear(torch.autograd.Function):
    """`normalized_linear` with its gradients."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalized_linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalized_linear_gradients(grad, *ctx.saved_tensors)


def normalized_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LN(x) Wᵀ + b. The normalized tokens are never stored whole."""
    if torch.compiler.is_compiling():
        return F.linear(F.layer_norm(x, x.shape[-1:], eps=EPS), weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    tokens, y = x.flatten(0, -2), out.flatten(0, -2)
    for at in _stretches(tokens):
        torch.addmm(bias, F.layer_norm(tokens[at], x.shape[-1:], eps=EPS), weight.mT, out=y[at])
    return out


def normalized_linear_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias."""
    flat, tokens, shape = grad.flatten(0, -2), x.flatten(0, -2), list(x.shape[-1:])
    pieces, dweight = [], torch.zeros_like(weight)
    with without_autocast(x.device):
        for at in _stretches(tokens):
            normalized, mean, rstd = torch.native_layer_norm(tokens[at], shape, None, None, EPS)
            dweight = dweight.addmm(flat[at].mT, normalized)
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                flat[at] @ weight, tokens[at], shape, mean, rstd, None, None, [True, False, False]
            )
            pieces.append(dx)
    dx = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return dx.view(x.shape), dweight, flat.sum(0)


def _stretches(tokens: Tensor) -> list[slice]:
    """Of tokens [n, dim], as many as stay in the cache; all of them for a compiler."""
    step = max(1, NUMBERS // tokens.shape[1]) if not torch.compiler.is_compiling() else tokens.shape[0]
    return [slice(start, start + step) for start in range(0, max(1, tokens.shape[0]), max(1, step))]


def context(decay: Tensor, u: Tensor, layout: Layout, initial: Tensor, causal: bool) -> Tensor:
    """sum_i K(t, i) u_i over earlier tokens and the token itself, and over later ones if not causal."""
    padding, starts = layout.padding, layout.starts
    forward_decay = decay
    if padding is not None and starts is not None:
        decay = decay.masked_fill(padding[..., None], 1)
        u = u.masked_fill(padding[..., None], 0)
        forward_decay = decay.masked_fill(starts[..., None], 0)
    h = linear_recurrence(forward_decay, u, initial)
    if causal:
        return h
    ends = layout.ends
    backward_decay = decay if ends is None else decay.masked_fill(ends[..., None], 0)
    # later_t = backward_decay_t * (u_{t+1} + later_{t+1}): exclusive, so the token itself counts once.
    shifted_u = torch.cat([u[:, 1:], torch.zeros_like(u[:, :1])], 1)
    later = linear_recurrence(backward_decay.flip(1), (backward_decay * shifted_u).flip(1), torch.zeros_like(initial))
    return h + later.flip(1)
