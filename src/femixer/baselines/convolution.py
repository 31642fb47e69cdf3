"""The short causal convolution per channel that many linear-time mixers put behind their projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.layout import Layout


class Memory(NamedTuple):
    """Of a mixer with a convolution or a token shift in front of its recurrence: the last real inputs [B, n, C] of the
    one, the state [B, ...] of the other."""

    recent: Tensor
    states: Tensor


class ShortConvolution(nn.Module):
    """y_t = sum_{j<width} w_j x_{t-j} + b, per channel, over the tokens of t's segment."""

    def __init__(self, channels: int, width: int = 4, bias: bool = False, **made: Any) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels, **made))  # weight[j] is for j tokens ago
        self.bias = nn.Parameter(torch.empty(channels, **made)) if bias else None
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
