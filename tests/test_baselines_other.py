"""Hyena, Mamba, differential transformer, LASER, AFT and HGRN against their published recurrences, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, stir
from published import convolved, rms
from torch import Tensor, nn

from femixer.baselines import AFT, BASELINES, HGRN, DiffTransformer, Hyena, Laser, Mamba
from femixer.baselines.kernels.long_convolution import CHUNK, long_convolution

EXACT = 1e-10
BATCH, LENGTH, DIM = 2, 13, 12


def build(kind: type[nn.Module], heads: int = 3, dim: int = DIM, **options: Any) -> Any:
    return stir(kind(dim, heads, dtype=torch.float64, **options))


def tokens(batch: int = BATCH, length: int = LENGTH, dim: int = DIM) -> Tensor:
    return noise(batch, length, dim, seed=1)


def check(m: Any, published: Tensor, x: Tensor) -> None:
    assert_close({"y": m(x)}, {"y": published}, EXACT)


def turned(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions of x [B, T, E] by complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    speed = base ** -(torch.arange(pairs.shape[-1]).double() / pairs.shape[-1])
    angle = torch.arange(x.shape[1]).double()[:, None] * speed
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def causal_softmax(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf).softmax(-1)


class TestDiffTransformer:
    def published(self, m: DiffTransformer, x: Tensor, heads: int) -> Tensor:
        """heads: of the publication; each has q1, q2, k1, k2 of width E and v of width 2 E."""
        width = DIM // heads // 2
        q, k = (part.split(width, -1) for part in m.query_key_proj(x).split(DIM, -1))
        v = m.value_proj(x).split(2 * width, -1)
        lq1, lk1, lq2, lk2 = m.lam
        lam = (lq1 @ lk1).exp() - (lq2 @ lk2).exp() + m.lambda_init
        o = []
        for h in range(heads):
            first, second = (causal_softmax(turned(q[2 * h + j]), turned(k[2 * h + j])) for j in range(2))
            read = (first - lam * second) @ v[h]
            o.append((1 - m.lambda_init) * rms(read, m.norm.weight))
        return m.out_proj(torch.cat(o, -1))

    @pytest.mark.parametrize("depth", [1, 4])
    def test_published(self, depth: int):
        m, x = build(DiffTransformer, 6, depth=depth), tokens()
        check(m, self.published(m, x, 3), x)

    def test_lambda_starts_as_the_publication_gives_it_by_depth(self):
        """0.8 - 0.6 exp(-0.3 (depth - 1)): 0.2 in the first layer, towards 0.8 in deep ones."""
        starts = [DiffTransformer(DIM, 2, depth=depth).lambda_init for depth in (1, 2, 28)]
        assert starts == pytest.approx([0.2, 0.3555090676, 0.7998178], abs=1e-6)


class TestLaser:
    @staticmethod
    def published(m: Laser, x: Tensor) -> Tensor:
        q, k, v = (*m.query_key_proj(x).split(DIM, -1), m.value_proj(x))
        o = []
        for part in zip(*(t.split(m.width, -1) for t in (q, k, v)), strict=True):
            weights = causal_softmax(turned(part[0]), turned(part[1]))
            o.append((weights.log()[..., None] + part[2][:, None]).logsumexp(2))
        return m.out_proj(torch.cat(o, -1))

    def test_published(self):
        m, x = build(Laser), tokens()
        check(m, self.published(m, x), x)

    def test_exact_for_values_far_apart(self):
        """exp(v) itself would overflow."""
        m, x = build(Laser), tokens()
        with torch.no_grad():
            m.value_proj.weight *= 1e4
        check(m, self.published(m, x), x)


class TestAFT:
    @staticmethod
    def published(m: AFT, x: Tensor) -> Tensor:
        q, k, v = m.in_proj(x).split(DIM, -1)
        y = [q[:, t].sigmoid() * (k[:, : t + 1].softmax(1) * v[:, : t + 1]).sum(1) for t in range(x.shape[1])]
        return m.out_proj(torch.stack(y, 1))

    @pytest.mark.parametrize("size", [1.0, 1e4])
    def test_published_for_keys_of_any_size(self, size: float):
        m, x = build(AFT), tokens()
        with torch.no_grad():
            m.in_proj.weight[DIM : 2 * DIM] *= size
        check(m, self.published(m, x), x)


class TestHGRN:
    @pytest.mark.parametrize("lower_bound", [0.0, 0.7])
    @pytest.mark.parametrize("complex", [False, True])
    def test_published(self, complex: bool, lower_bound: float):
        m, x = build(HGRN, lower_bound=lower_bound, complex=complex), tokens()
        width = 7 if complex else DIM  # 4 * 12 / 7
        c, f, g = m.in_proj(x).split((m.parts * width, width, m.parts * width), -1)
        c, f = F.silu(c), lower_bound + (1 - lower_bound) * f.sigmoid()
        c = torch.complex(c[..., :width], c[..., width:] if complex else torch.zeros_like(c))
        turn = torch.polar(torch.ones_like(m.theta), m.theta) if complex else torch.tensor(1.0)
        h, o = torch.zeros_like(c[:, 0]), []
        for t in range(LENGTH):
            h = f[:, t] * turn * h + (1 - f[:, t]) * c[:, t]
            if complex:
                both = torch.cat([h.real, h.imag], -1)
                normed = F.layer_norm(both, both.shape[-1:], m.norm.weight, m.norm.bias)
            else:
                normed = rms(h.real, m.norm.weight)
            o.append(normed * F.silu(g[:, t]))
        check(m, m.out_proj(torch.stack(o, 1)), x)


class TestMamba:
    def test_published(self):
        m, x = build(Mamba, state_size=5, rank=2), tokens()
        u, z = m.in_proj(x).split(m.inner, -1)
        u = F.silu(convolved(u, m.convolution.weight) + m.convolution.bias)
        low, b, c = m.select_proj(u).split((2, 5, 5), -1)
        delta = F.softplus(m.step_proj(low))
        h, y = u.new_zeros(BATCH, m.inner, 5), []
        for t in range(LENGTH):
            d = delta[:, t, :, None]
            h = (d * -m.log_rate.exp().T).exp() * h + d * b[:, t, None] * u[:, t, :, None]
            y.append(((h * c[:, t, None]).sum(-1) + m.skip * u[:, t]) * F.silu(z[:, t]))
        check(m, m.out_proj(torch.stack(y, 1)), x)

    def test_starts_as_published(self):
        m = Mamba(64, 4)
        steps = F.softplus(m.step_proj.bias)
        assert steps.min() > 0.99e-3 and steps.max() < 1.01e-1
        assert steps.log().std() > 1  # spread over the two decades, not bunched
        assert torch.allclose(-m.log_rate.exp(), -torch.arange(1.0, 17.0)[:, None].expand(16, 128))
        assert m.rank == 4 and (m.skip == 1).all()


class TestHyena:
    def test_published(self):
        m, x = build(Hyena, length=17, filter_width=5, bands=3), tokens()
        filter = []
        for t in range(LENGTH):
            angles = [2 * math.pi * t / 17 * f for f in (1e-4, (1e-4 + 2) / 2, 2)]
            z = torch.tensor([t / 16, *map(math.cos, angles), *(-math.sin(a) for a in angles)], dtype=x.dtype)
            for layer in m.filter.layers:
                z = (m.filter.frequency * layer(z)).sin()
            window = [0.01 ** (t / 16 * (2 / 3 + 8 / 3 * c / (DIM - 1))) for c in range(DIM)]
            filter.append(m.filter.last(z) * torch.tensor(window, dtype=x.dtype))
        q, k, v = (convolved(m.in_proj(x), m.convolution.weight) + m.convolution.bias).split(DIM, -1)
        u = k * v
        y = [q[:, t] * (sum(filter[t - i] * u[:, i] for i in range(t + 1)) + m.skip * u[:, t]) for t in range(LENGTH)]
        check(m, m.out_proj(torch.stack(y, 1)), x)

    def test_filters_of_any_length_agree_where_they_overlap(self):
        m = build(Hyena, length=5)
        torch.testing.assert_close(
            m.filter(31)[:7], m.filter(7), rtol=1e-9, atol=1e-12
        )  # other products round otherwise

    def test_the_filter_starts_of_order_one_and_falls(self):
        torch.manual_seed(0)
        filter = Hyena(64, 4, length=100).filter(100)
        assert filter[:10].std() > 0.1
        assert filter[-10:, -1].abs().max() < 1e-5  # the fastest channel: 0.01 after 30 tokens


class TestLongConvolution:
    @staticmethod
    def naive(u: Tensor, kernel: Tensor, run: Tensor | None) -> Tensor:
        """Rank by rank of the real tokens."""
        length = u.shape[1]
        real = torch.ones(u.shape[:2], dtype=torch.bool) if run is None else run >= 0
        rank = real.cumsum(1)
        distance = rank[:, :, None] - rank[:, None]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & real[:, :, None] & real[:, None]
        if run is not None:
            seen = seen & (run[:, :, None] == run[:, None])
        weights = kernel[distance.clamp(min=0)] * seen[..., None]
        return (weights * u[:, None]).sum(2)

    @pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
    @pytest.mark.parametrize("packed", [True, False])
    def test_is_the_sum_with_gradients(self, length: int, packed: bool):
        """Packed: segments of 1, 2, 4, ... tokens with padding between and within them."""
        u, kernel = noise(2, length, 3, seed=1).requires_grad_(), noise(length, 3, seed=2).requires_grad_()
        run = None
        if packed:
            run = (torch.arange(1, length + 1).log2().floor().long()).repeat(2, 1)
            run[0, ::5] = -1
        results = []
        for y in (long_convolution(u, kernel, run), self.naive(u, kernel, run)):
            d_u, d_kernel = torch.autograd.grad((y * noise(*y.shape, seed=3)).sum(), (u, kernel))
            results.append({"y": y, "d u": d_u, "d kernel": d_kernel})
        assert_close(*results, EXACT)
        last = long_convolution(u, kernel, run, last=True)
        assert_close({"y": last}, {"y": results[1]["y"][:, -1:]}, EXACT)

    def test_a_huge_future_leaves_no_rounding_in_the_past(self):
        """One FFT over the whole sequence would: its error is relative to the largest value anywhere."""
        u, kernel = noise(1, 500, 3, seed=1).float(), noise(500, 3, seed=2).float()
        loud = u.clone()
        loud[:, 300:] *= 1e8
        assert_close(
            {"y": long_convolution(loud, kernel, None)[:, :300]}, {"y": self.naive(u, kernel, None)[:, :300]}, 1e-5
        )
        u = u.double().requires_grad_()
        (gradient,) = torch.autograd.grad(long_convolution(u, kernel.double(), None)[:, :300].sum(), u)
        assert gradient[:, 300:].count_nonzero() == 0


class TestAll:
    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("aft", 0),
            ("laser", 0),
            ("diff-transformer", 4 * 8 + 16),
            ("hgrn", 64),
            ("hyena", 77 * 64 + 10560),
            ("mamba", 2 * 64**2 + 2 * 64 * (7 + 2 * 4 + 3 * 16)),
        ],
    )
    def test_parameters_are_those_of_attention_and_what_the_docstring_says(self, name: str, extra: int):
        count = sum(parameter.numel() for parameter in BASELINES[name](64, 8).parameters())
        assert count == 4 * 64**2 + extra
