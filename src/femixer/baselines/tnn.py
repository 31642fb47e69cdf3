"""Toeplitz neural network: gates around a Toeplitz matrix per channel, made from relative positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.kernels.long_convolution import long_convolution
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout, segments_together
from femixer.options import check
from femixer.state import Growing


class Coefficients(nn.Module):
    """decay^|n| MLP(n) for distances n: [T, channels]. The MLP is a linear map of the number n, then `layers` hidden
    layers linear(relu(norm(.))) and one such layer to the channels; norms are x / rms(x)."""

    def __init__(self, channels: int, width: int, layers: int, decay: float, **made: Any) -> None:
        super().__init__()
        self.decay = decay
        self.first = nn.Linear(1, width, **made)
        self.layers = nn.ModuleList(nn.Linear(width, width, **made) for _ in range(layers))
        self.last = nn.Linear(width, channels, **made)

    def reset_parameters(self) -> None:
        # torch's own: with projections as small as elsewhere all distances would begin the same.
        for linear in (self.first, *self.layers, self.last):
            assert isinstance(linear, nn.Linear)
            linear.reset_parameters()

    def forward(self, tokens: int, direction: int) -> Tensor:
        """Of the distances 0, direction, 2 direction, ...: in float32 at least."""
        weight = self.last.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with without_autocast(weight.device):
            distance = torch.arange(tokens, dtype=torch.float64, device=weight.device)[:, None]
            first, *others = self.first, *self.layers, self.last
            z = F.linear((direction * distance).to(dtype), first.weight.to(dtype), first.bias.to(dtype))
            for linear in others:
                assert isinstance(linear, nn.Linear)
                z = F.relu(F.rms_norm(z, z.shape[-1:], eps=1e-6))
                z = F.linear(z, linear.weight.to(dtype), linear.bias.to(dtype))
            return z * (self.decay**distance).to(dtype)


class Memory(NamedTuple):
    """What the matrix has read, [B, 1, S, C], and its segments [B, S] where there was padding or a segment."""

    history: Growing
    segment: Tensor | None


class TNN(Baseline):
    """y_t = [silu(x_t W_u) * sum_i c[t-i] * silu(x_i W_v)] W_o, with c[n] = decay^|n| MLP(n) per channel.

    Causal: over i <= t. See Coefficients for the MLP. expand * dim channels: 4 dim² parameters at the default 4/3, and
    (layers rpe_width + channels) rpe_width of the MLP. Published are expand=3, a wider MLP, three layers and a decay of
    0.99; images are read as a sequence here. No use of heads. A stream keeps what the matrix read, so that its memory
    grows as attention's. Qin et al. 2023, arXiv 2305.04749.
    """

    encoder = True

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        expand: float = 4 / 3,
        rpe_width: int = 32,
        layers: int = 3,
        decay: float = 0.99,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(round(expand * dim) >= 1, "expand", expand, "a positive factor of dim channels")
        for name, size, least in (("rpe_width", rpe_width, 1), ("layers", layers, 0)):
            check(isinstance(size, int) and size >= least, name, size, f"an integer of at least {least}")
        check(0 < decay <= 1, "decay", decay, "a number above 0 and at most 1")
        channels = round(expand * dim)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 2 * channels, bias=bias, **made)
        self.coefficients = Coefficients(channels, rpe_width, layers, decay, **made)
        self.out_proj = nn.Linear(channels, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        u, v = F.silu(self.in_proj(x)).chunk(2, -1)
        history, segment = None, layout.segment
        if memory is not None:
            history = memory.history.append(v[:, None])
            segment = segments_together(memory.segment, memory.history.length, segment, x)
        elif keep:
            history = Growing.of(v[:, None].contiguous())
        whole, length = v if history is None else history.tensor[:, 0], x.shape[1]
        past = self.coefficients(whole.shape[1], 1)
        read = long_convolution(whole, past, segment, last=length == 1)[:, -length:]
        if not self.causal:
            future = F.pad(self.coefficients(length, -1)[1:], (0, 0, 1, 0))  # the token itself is read already
            read = read + long_convolution(v.flip(1), future, _mirrored(segment)).flip(1)
        o = u.to(read.dtype) * read
        y = self.out_proj(self.dropout(o.to(x.dtype)))
        return y, None if history is None or not keep else Memory(history, segment)


def _mirrored(segment: Tensor | None) -> Tensor | None:
    """Numbers of the segments in reversed time, ascending again."""
    if segment is None:
        return None
    segment = segment.flip(1)
    return torch.where(segment < 0, segment, segment.amax(1, keepdim=True) - segment)
