"""Convolutions as long as the sequence, their coefficients an MLP of the distance: Hyena, gated twice, and the Toeplitz
neural network, which may also look ahead.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, ShortConvolution
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

    def __init__(
        self, channels: int, width: int, bands: int, frequency: float, length: int, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.channels, self.bands, self.start, self.length = channels, bands, frequency, length
        sizes = [1 + 2 * bands, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(n, m, **factory_kwargs) for n, m in itertools.pairwise(sizes))
        self.last = nn.Linear(width, channels, bias=False, **factory_kwargs)
        self.frequency = nn.Parameter(torch.empty(width, **factory_kwargs))
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


def with_past(u: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Growing | None, Tensor | None]:
    """All that a convolution reads, u [B, T, C] and what the memory has of the tokens before: [B, S, C]; the same to be
    kept, if it is; the segments [B, S] of it, None where there is only one."""
    history, segment = None, layout.segment
    if memory is not None:
        history = memory.history.append(u[:, None])
        segment = segments_together(memory.segment, memory.history.length, segment, u)
    elif keep:
        history = Growing.of(u[:, None].contiguous())
    return u if history is None else history.tensor[:, 0], history, segment


class HyenaMemory(NamedTuple):
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
        *,
        length: int = 1024,
        filter_width: int = 64,
        bands: int = 16,
        frequency: float = 14.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        for name, size, least in (("length", length, 2), ("filter_width", filter_width, 1), ("bands", bands, 1)):
            check(isinstance(size, int) and size >= least, name, size, f"an integer of at least {least}")
        self.in_proj = self.linear(dim, 3 * dim)
        self.convolution = ShortConvolution(3 * dim, 3, bias=True, **self.factory_kwargs)
        self.filter = Filter(dim, filter_width, bands, frequency, length, **self.factory_kwargs)
        self.skip = self.empty(dim)  # D
        self.out_proj = self.linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.skip)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        before = None if memory is None else memory.recent
        projected, recent = self.convolution(self.in_proj(x), layout, before)
        q, k, v = projected.chunk(3, -1)
        u = k * v
        whole, history, segment = with_past(u, layout, memory, keep)
        read = long_convolution(whole, self.filter(whole.shape[1]), segment, last=x.shape[1] == 1)[:, -x.shape[1] :]
        o = q.to(read.dtype) * torch.addcmul(read, self.skip.to(read.dtype), u.to(read.dtype))
        return o.to(x.dtype), None if history is None or not keep else HyenaMemory(recent, history, segment)


class Coefficients(nn.Module):
    """decay^|n| MLP(n) for distances n: [T, channels]. The MLP is a linear map of the number n, then `layers` hidden
    layers linear(relu(norm(.))) and one such layer to the channels; norms are x / rms(x)."""

    def __init__(self, channels: int, width: int, layers: int, decay: float, **factory_kwargs: Any) -> None:
        super().__init__()
        self.decay = decay
        self.first = nn.Linear(1, width, **factory_kwargs)
        self.layers = nn.ModuleList(nn.Linear(width, width, **factory_kwargs) for _ in range(layers))
        self.last = nn.Linear(width, channels, **factory_kwargs)

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


class TNNMemory(NamedTuple):
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
        *,
        expand: float = 4 / 3,
        rpe_width: int = 32,
        layers: int = 3,
        decay: float = 0.99,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        check(round(expand * dim) >= 1, "expand", expand, "a positive factor of dim channels")
        for name, size, least in (("rpe_width", rpe_width, 1), ("layers", layers, 0)):
            check(isinstance(size, int) and size >= least, name, size, f"an integer of at least {least}")
        check(0 < decay <= 1, "decay", decay, "a number above 0 and at most 1")
        channels = round(expand * dim)
        self.in_proj = self.linear(dim, 2 * channels)
        self.coefficients = Coefficients(channels, rpe_width, layers, decay, **self.factory_kwargs)
        self.out_proj = self.linear(channels, dim)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        u, v = F.silu(self.in_proj(x)).chunk(2, -1)
        whole, history, segment = with_past(v, layout, memory, keep)
        length = x.shape[1]
        past = self.coefficients(whole.shape[1], 1)
        read = long_convolution(whole, past, segment, last=length == 1)[:, -length:]
        if not self.causal:
            future = F.pad(self.coefficients(length, -1)[1:], (0, 0, 1, 0))  # the token itself is read already
            read = read + long_convolution(v.flip(1), future, _mirrored(segment)).flip(1)
        o = u.to(read.dtype) * read
        return o.to(x.dtype), None if history is None or not keep else TNNMemory(history, segment)


def _mirrored(segment: Tensor | None) -> Tensor | None:
    """Numbers of the segments in reversed time, ascending again."""
    if segment is None:
        return None
    segment = segment.flip(1)
    return torch.where(segment < 0, segment, segment.amax(1, keepdim=True) - segment)
