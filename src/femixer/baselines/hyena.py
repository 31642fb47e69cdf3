"""Hyena: gates around a convolution with an implicit filter as long as the sequence."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.convolution import ShortConvolution
from femixer.baselines.kernels.long_convolution import long_convolution
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout, segments_together
from femixer.options import check
from femixer.state import Growing

# The window falls to TARGET within these shares of the reference length, in the fastest and the slowest channel.
TARGET, FAST, SLOW = 1e-2, 0.3, 1.5


class Filter(nn.Module):
    """filter[t] = MLP(z_t) * 0.01^(a t / (length - 1)) for the distances t = 0, 1, ...: [T, channels].

    z_t holds t / (length - 1) and the cosines and sines of `bands` frequencies up to bands - 1 periods in `length`; the
    MLP has three hidden layers sin(frequency * .) with frequencies that are learned and shared; a grows linearly over
    the channels from 2/3 to 10/3. `length` is a reference only: filters of any length agree where they overlap.
    """

    def __init__(self, channels: int, width: int, bands: int, frequency: float, length: int, **made: Any) -> None:
        super().__init__()
        self.channels, self.bands, self.start, self.length = channels, bands, frequency, length
        sizes = [1 + 2 * bands, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(n, m, **made) for n, m in itertools.pairwise(sizes))
        self.last = nn.Linear(width, channels, bias=False, **made)
        self.frequency = nn.Parameter(torch.empty(width, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # torch's own: with projections as small as elsewhere the sines would begin linear and the filter at zero.
        for linear in (*self.layers, self.last):
            linear.reset_parameters()
        nn.init.constant_(self.frequency, self.start)

    def forward(self, tokens: int) -> Tensor:
        """[tokens, channels], in float32 at least."""
        weight = self.last.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with without_autocast(weight.device):
            place = torch.arange(tokens, dtype=torch.float64, device=weight.device)[:, None]
            time = place / (self.length - 1)
            periods = torch.linspace(1e-4, self.bands - 1, self.bands, dtype=torch.float64, device=weight.device)
            angle = 2 * math.pi * place / self.length * periods
            z = torch.cat([time, angle.cos(), -angle.sin()], 1).to(dtype)
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                z = F.linear(z, layer.weight.to(dtype), layer.bias.to(dtype))
                z = (self.frequency.to(dtype) * z).sin()
            fall = torch.linspace(1 / SLOW, 1 / FAST, self.channels, dtype=torch.float64, device=weight.device)
            return F.linear(z, weight.to(dtype)) * (TARGET ** (time * fall)).to(dtype)

    def extra_repr(self) -> str:
        return f"bands={self.bands}, length={self.length}"


class Memory(NamedTuple):
    """The last inputs of the short convolution [B, 2, 3 dim]; all of the long one's [B, 1, S, dim]; their segments
    [B, S] where there was padding or a segment."""

    recent: Tensor
    history: Growing
    segment: Tensor | None


class Hyena(Baseline):
    """y_t = [q_t * (sum_{i<=t} filter[t-i] u_i + D u_t)] W_o with u = k * v, and q, k, v = conv(x W): order 2.

    conv is a short convolution of width 3, the filter an MLP of the distance (see Filter) with the settings of the
    published language models. length: the filter's reference length, published as the length of the training sequences.
    4 dim² parameters, and 77 dim + 10560 more at the default filter; no use of heads. A stream keeps u, so that its
    memory grows as attention's. Poli et al. 2023, arXiv 2302.10866.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        length: int = 1024,
        filter_width: int = 64,
        bands: int = 16,
        frequency: float = 14.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        for name, size, least in (("length", length, 2), ("filter_width", filter_width, 1), ("bands", bands, 1)):
            check(isinstance(size, int) and size >= least, name, size, f"an integer of at least {least}")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.convolution = ShortConvolution(3 * dim, 3, bias=True, **made)
        self.filter = Filter(dim, filter_width, bands, frequency, length, **made)
        self.skip = nn.Parameter(torch.empty(dim, **made))  # D
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.skip)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        before = None if memory is None else memory.recent
        projected, recent = self.convolution(self.in_proj(x), layout, before)
        q, k, v = projected.chunk(3, -1)
        u = k * v
        history, segment = None, layout.segment
        if memory is not None:
            history = memory.history.append(u[:, None])
            segment = segments_together(memory.segment, memory.history.length, segment, x)
        elif keep:
            history = Growing.of(u[:, None])
        whole = u if history is None else history.tensor[:, 0]
        read = long_convolution(whole, self.filter(whole.shape[1]), segment, last=x.shape[1] == 1)[:, -x.shape[1] :]
        o = q.to(read.dtype) * torch.addcmul(read, self.skip.to(read.dtype), u.to(read.dtype))
        y = self.out_proj(self.dropout(o.to(x.dtype)))
        return y, None if history is None or not keep else Memory(recent, history, segment)
