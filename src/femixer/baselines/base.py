"""The interface of a baseline: projections and a recurrence of its own behind FreeEnergyMixer's signature.

Beside it what several of them have: norms, the start of steps, checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import inverse_softplus
from femixer.layer import MixerLayer
from femixer.layout import Layout, arrange
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


class Baseline(MixerLayer):
    """Mixer [B, T, dim] -> [B, T, dim], causal unless it can be an `encoder`. Subclasses define `mix` and end in
    `self.out_proj`.

    Padding is taken out here: `mix` sees the real tokens of every row first and padding, if any, behind them, so that
    a convolution or a token shift finds its neighbours where it looks for them.
    """

    encoder = False

    def __init__(self, dim: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, causal, dropout)
        if not causal and not self.encoder:
            raise ValueError(f"causal={causal!r} is not allowed: {type(self).__name__} is causal by definition")

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        """x [B, T, dim] -> (y [B, T, dim], what to remember of it if `keep`).

        layout.segment is None, or [B, T] with padding (-1) only at the end of rows. memory: of the tokens before x,
        None before the first; a NamedTuple of tensors with the batch first or of Growing, or such a tensor itself.
        What y is at padding does not matter, but it must be finite and memory must not depend on it.
        """
        raise TypeError(f"{type(self).__name__} must define mix()")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x [B, T, dim] -> [B, T, dim], with return_state also the state from which the next tokens go on.

        mask, segments: as for FreeEnergyMixer.
        """
        self.check_inputs(x, mask, segments, state, return_state)
        before = self.before(x, state)
        layout, past = arrange(x, mask, segments, before.past)
        memory = usable(before.prior)
        padding = layout.padding
        if x.shape[0] == 0 or x.shape[1] == 0:
            y = x.clone()
        elif padding is None or layout.segment is None:
            y, memory = self.mix(x, layout, memory, return_state)
        else:
            order = padding.long().argsort(dim=1, stable=True)
            fields = (x.gather(1, order) for x in (layout.segment, layout.position, padding))
            together = Layout(*fields)
            # Whatever stands at padding, also infinity, must not reach a sum, not even multiplied by zero.
            real = x.masked_fill(padding[..., None], 0).gather(1, order[..., None].expand_as(x))
            mixed, memory = self.mix(real, together, memory, return_state)
            y = torch.zeros_like(mixed).scatter(1, order[..., None].expand_as(mixed), mixed)
            y = y.masked_fill(padding[..., None], 0)
        return (y, before.next(past, memory, None)) if return_state else y

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
