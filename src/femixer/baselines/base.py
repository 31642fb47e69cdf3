"""The interface of a baseline: projections and a recurrence of its own behind FreeEnergyMixer's signature.

Beside it what several of them have: norms, short convolutions, the start of steps, checks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import inverse_softplus
from femixer.layer import MixerLayer
from femixer.layout import Layout
from femixer.options import check
from femixer.state import State, usable


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadNorm(nn.GroupNorm):
    """(x - mean) / std * weight + bias with mean and std per token and head: x [B, T, H, D] -> [B, T, H D]."""

    def forward(self, x: Tensor) -> Tensor:
        # torch.compile has wrong strides for the gradient of other layouts.
        normed = F.layer_norm(x.contiguous(), x.shape[3:], eps=self.eps).flatten(2)
        return torch.addcmul(self.bias.to(x.dtype), normed, self.weight.to(x.dtype))


SHORTEST, LONGEST = 1e-3, 1e-1  # steps of Mamba and its kin at the start


def random_steps_(bias: Tensor) -> Tensor:
    """Fill a bias b so that softplus(b) is random, evenly in log, between 0.001 and 0.1."""
    with torch.no_grad():
        logs = torch.empty_like(bias, dtype=torch.float64).uniform_(math.log(SHORTEST), math.log(LONGEST))
        return bias.copy_(inverse_softplus(logs.exp()))


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names the first option that is not a positive integer."""
    for name, size in sizes.items():
        check(isinstance(size, int) and size >= 1, name, size, "a positive integer")


class Common(TypedDict, total=False):
    """Arguments that all of them have, as `Baseline` takes them."""

    causal: bool
    bias: bool
    dropout: float
    device: torch.device | str | None
    dtype: torch.dtype | None


class Baseline(MixerLayer):
    """Mixer [B, T, dim] -> [B, T, dim], causal unless it can be an `encoder`. Subclasses define `mix` and the
    `out_proj` behind it.

    Padding is taken out here: `mix` sees the real tokens of every row first and padding, if any, behind them, so that
    a convolution or a token shift finds its neighbours where it looks for them.
    """

    encoder = False
    out_proj: nn.Linear

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """bias, device, dtype: of the parameters, which subclasses make by `linear` and `empty`."""
        super().__init__(dim, heads, causal, dropout)
        if not causal and not self.encoder:
            raise ValueError(f"causal={causal!r} is not allowed: {type(self).__name__} is causal by definition")
        self._biased, self.factory_kwargs = bias, dict[str, Any](device=device, dtype=dtype)

    def linear(self, inputs: int, outputs: int, bias: bool | None = None) -> nn.Linear:
        """bias: by default as it was asked for."""
        return nn.Linear(inputs, outputs, bias=self._biased if bias is None else bias, **self.factory_kwargs)

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, **self.factory_kwargs))

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        """x [B, T, dim] -> (the read [B, T, C] that `out_proj` maps to y, what to remember of it if `keep`).

        layout.segment is None, or [B, T] with padding (-1) only at the end of rows. memory: of the tokens before x,
        None before the first; a NamedTuple of tensors with the batch first or of Growing, or such a tensor itself.
        What is read at padding does not matter, but it must be finite and memory must not depend on it.
        """
        raise TypeError(f"{type(self).__name__} must define mix()")

    def mixed(self, x: Tensor, layout: Layout, before: State, keep: bool) -> tuple[Tensor, Any, None]:
        memory, padding = usable(before.prior), layout.padding
        if x.shape[0] == 0 or x.shape[1] == 0:
            return x.clone(), memory, None
        if padding is None or layout.segment is None:
            read, memory = self.mix(x, layout, memory, keep)
            return self.out_proj(self.dropout(read)), memory, None
        order = padding.long().argsort(dim=1, stable=True)
        together = Layout(*(x.gather(1, order) for x in (layout.segment, layout.position, padding)))
        read, memory = self.mix(x.gather(1, order[..., None].expand_as(x)), together, memory, keep)
        y = self.out_proj(self.dropout(read))
        return torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y), memory, None

    def reset_parameters(self) -> None:
        """Projections start as everywhere in femixer, N(0, 0.02) with zero biases; norms, convolutions and other parts
        as they say. Subclasses add parameters of their own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for part in self.children():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None and not isinstance(part, nn.Linear):
                reset()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}"


class Memory(NamedTuple):
    """Of a mixer with a convolution or a token shift in front of its recurrence: the last real inputs [B, n, C] of the
    one, the state [B, ...] of the other."""

    recent: Tensor
    states: Tensor


class ShortConvolution(nn.Module):
    """y_t = sum_{j<width} w_j x_{t-j} + b, per channel, over the tokens of t's segment."""

    def __init__(self, channels: int, width: int = 4, bias: bool = False, **factory_kwargs: Any) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels, **factory_kwargs))  # weight[j] is for j tokens ago
        self.bias = nn.Parameter(torch.empty(channels, **factory_kwargs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5  # as torch's convolutions: one input channel, `width` taps
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, layout: Layout, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, T, C] with padding at the end of rows only; before [B, width - 1, C]: the real tokens before.

        -> (y [B, T, C], the last width - 1 real tokens).
        """
        reach, length = self.width - 1, x.shape[1]
        if before is None:
            before = x.new_zeros(x.shape[0], reach, self.channels)
        whole = torch.cat([before.to(x.dtype), x], 1)
        weight = self.weight.to(x.dtype)
        y = x * weight[0]
        for j in range(1, self.width):
            earlier = whole[:, reach - j : reach - j + length]
            if layout.segment is not None:
                earlier = earlier.masked_fill((layout.position < j)[..., None], 0)
            y = torch.addcmul(y, earlier, weight[j])
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y, last_tokens(whole, reach, layout)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}"


def token_before(x: Tensor, layout: Layout, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the token before each of x [B, T, dim] in its segment, zero where there is none; the last real token).

    before [B, 1, dim]: the last real token before x.
    """
    before = torch.zeros_like(x[:, :1]) if before is None else before.to(x.dtype)
    whole = torch.cat([before, x], 1)
    earlier = whole[:, :-1]
    if layout.segment is not None:
        earlier = earlier.masked_fill((layout.position == 0)[..., None], 0)
    return earlier, last_tokens(whole, 1, layout)


def last_tokens(whole: Tensor, count: int, layout: Layout) -> Tensor:
    """The last `count` real tokens of whole [B, count + T, C], whose last T lie as in `layout`, as a copy."""
    if layout.segment is None:
        return whole[:, whole.shape[1] - count :].clone()
    real = (layout.segment >= 0).sum(1, keepdim=True)
    index = real + torch.arange(count, device=whole.device)
    return whole.gather(1, index[..., None].expand(-1, -1, whole.shape[2]))
