"""Baselines with linear attention inside against the published recurrences, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, outcome, stir
from published import convolved, earlier, heads_of, rms
from torch import Tensor, nn

from femixer.baselines import BASELINES

EXACT = 1e-10
BATCH, LENGTH, DIM, HEADS = 2, 71, 21, 3  # several chunks, odd widths


def naive(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, exclusive: bool = False) -> tuple[Tensor, Tensor]:
    """S_t = decay_t * S_{t-1} + k_t v_tᵀ, y_t = S_tᵀ q_t, with decay [B, T, H, E or 1, D or 1]."""
    state = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3])
    y = []
    for t in range(q.shape[1]):
        after = decay[:, t] * state + k[:, t, :, :, None] * v[:, t, :, None]
        y.append(torch.einsum("bhe,bhed->bhd", q[:, t], state if exclusive else after))
        state = after
    return torch.stack(y, 1), state


def heads(x: Tensor) -> Tensor:
    return heads_of(x, HEADS)


def group_norm(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """x [B, T, H, D] -> [B, T, H D]"""
    centred = x - x.mean(-1, keepdim=True)
    return (centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(2) * norm.weight + norm.bias


def linear_attention_published(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in m.in_proj(x).chunk(3, -1))
    if m.feature_map is None:
        q, k = (torch.where(part > 0, part + 1, part.exp()) for part in (q, k))
    else:
        q, k = (
            torch.stack(
                [
                    torch.cat([F.softmax(part[:, :, h] @ w, -1), F.softmax(-(part[:, :, h] @ w), -1)], -1)
                    for h, w in enumerate(maps)
                ],
                2,
            )
            for part, maps in zip((q, k), m.feature_map, strict=True)
        )
    y = []
    for t in range(x.shape[1]):
        scores = torch.einsum("bhe,bshe->bsh", q[:, t], k[:, : t + 1])
        y.append((scores[..., None] * v[:, : t + 1]).sum(1) / (scores.sum(1)[..., None] + 1e-6))
    return m.out_proj(torch.stack(y, 1).flatten(2))


def mamba2_published(m: Any, x: Tensor) -> Tensor:
    inner, size = 2 * DIM, m.state_size
    z, u, step = m.in_proj(x).split((inner, inner + 2 * size, HEADS), -1)
    u = convolved(u, m.convolution.weight) + m.convolution.bias
    u, b, c = F.silu(u).split((inner, size, size), -1)
    step = (step + m.step_bias).exp().log1p()
    decay = torch.exp(-m.log_rate.exp() * step)[..., None, None]
    b, c = (part[:, :, None].expand(-1, -1, HEADS, -1) for part in (b, c))
    read, _ = naive(c, step[..., None] * b, heads(u), decay)
    y = (read + m.skip[:, None] * heads(u)).flatten(2)
    return m.out_proj(rms(y * F.silu(z), m.norm.weight))


def gla_published(m: Any, x: Tensor) -> Tensor:
    width = math.ceil(DIM / 2 / HEADS)
    q, k, v, g, low = m.in_proj(x).split((HEADS * width, HEADS * width, DIM, DIM, 16), -1)
    decay = torch.sigmoid(low @ m.decay_proj.weight.T + m.decay_proj.bias) ** (1 / 16)
    read, _ = naive(heads(q) / width**0.5, heads(k), heads(v), heads(decay)[..., None])
    return m.out_proj(rms(read, m.norm.weight).flatten(2) * F.silu(g))


def hgrn2_published(m: Any, x: Tensor) -> Tensor:
    q, f, i = m.in_proj(x).chunk(3, -1)
    f = m.lower_bound + (1 - m.lower_bound) * torch.sigmoid(f)
    read, _ = naive(heads(F.silu(q)) / (DIM / HEADS) ** 0.5, heads(1 - f), heads(i), heads(f)[..., None])
    return m.out_proj(rms(read.flatten(2), m.norm.weight))


def retnet_published(m: Any, x: Tensor) -> Tensor:
    width = m.width
    assert width == 4
    q, k, v, g = m.in_proj(x).split((HEADS * width, HEADS * width, DIM, DIM), -1)
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(heads(part).unflatten(-1, (-1, 2))) * turn).flatten(-2)
        for part in (q, k)
    )
    decay = torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], dtype=x.dtype)[:, None, None]
    read, _ = naive(q / width**0.5, k, heads(v), decay.expand(*x.shape[:2], -1, -1, -1))
    return m.out_proj(group_norm(read, m.norm) * F.silu(g))


def gsa_published(m: Any, x: Tensor) -> Tensor:
    projected = m.in_proj(x)
    q, k, v = (heads(F.silu(part)) for part in projected[..., : 3 * DIM].chunk(3, -1))
    kept = heads(torch.sigmoid(projected[..., 3 * DIM :]) ** (1 / 8))
    keys = values = x.new_zeros(x.shape[0], HEADS, m.slots, DIM // HEADS)
    y = []
    for t in range(x.shape[1]):
        a = kept[:, t, :, :, None]
        keys = a * keys + (1 - a) * k[:, t, :, None]
        values = a * values + (1 - a) * v[:, t, :, None]
        p = torch.softmax((keys * q[:, t, :, None]).sum(-1), -1)
        y.append((p[..., None] * values).sum(-2))
    return m.out_proj(rms(F.silu(torch.stack(y, 1).flatten(2)), m.norm.weight))


def rwkv6_published(m: Any, x: Tensor) -> Tensor:
    back = earlier(x, 1) - x
    low = torch.tanh((x + back * m.shift) @ m.shift_down.T).unflatten(-1, (5, -1))
    w, k, v, r, g = (x + back * (m.shifts[j] + low[:, :, j] @ m.shift_up[j]) for j in range(5))
    decay = torch.exp(-torch.exp(m.decay_bias + torch.tanh(w @ m.decay_down.T) @ m.decay_up.T))
    r, k, v = heads(m.receptance_proj(r)), heads(m.key_proj(k)), heads(m.value_proj(v))
    read, _ = naive(r, k, v, heads(decay)[..., None], exclusive=True)
    read = read + torch.einsum("bthe,he,bthe,bthd->bthd", r, m.bonus, k, v)
    return m.out_proj(group_norm(read, m.norm) * F.silu(m.gate_proj(g)))


PUBLISHED = {
    "elu": ("linear-attention", {}, linear_attention_published),
    "learned": ("linear-attention", {"feature_map": "learned"}, linear_attention_published),
    "mamba2": ("mamba2", {}, mamba2_published),
    "gla": ("gla", {}, gla_published),
    "hgrn2": ("hgrn2", {}, hgrn2_published),
    "hgrn2-bounded": ("hgrn2", {"lower_bound": 0.3}, hgrn2_published),
    "retnet": ("retnet", {}, retnet_published),
    "gsa": ("gsa", {}, gsa_published),
    "gsa-slots": ("gsa", {"slots": 5}, gsa_published),
    "rwkv6": ("rwkv6", {}, rwkv6_published),
}


class TestLayers:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_is_the_published_recurrence(self, name: str):
        mixer, options, published = PUBLISHED[name]
        m = stir(BASELINES[mixer](DIM, HEADS, bias=True, dtype=torch.float64, **options))
        x = noise(BATCH, LENGTH, DIM, seed=1)
        assert_close(outcome(m, m, x), outcome(m, lambda x: published(m, x), x), EXACT)

    # Columns of in_proj and out_proj at dim 64 in units of dim², and what comes on top of them.
    @pytest.mark.parametrize(
        ("name", "options", "matrices", "more"),
        [
            ("linear-attention", {}, 4.0, 0),
            ("linear-attention", {"feature_map": "learned"}, 4.0, 2 * 64 * 16),
            ("mamba2", {}, 6.5, 64 * 4 + 5 * (128 + 2 * 16) + 3 * 4 + 128),
            ("gla", {}, 4.0, 64 * 16 + 17 * 32 + 16),
            ("hgrn2", {}, 4.0, 64),
            ("retnet", {}, 4.0, 2 * 64),
            ("retnet", {"expand": 2.0}, 8.0, 4 * 64),
            ("gsa", {}, 5.0, 64),
            ("rwkv6", {}, 4.0, 6 * 64 + 2 * 5 * 4 * 64 + 8 * (64 + 32) + 2 * 32 + 2 * 64),
        ],
    )
    def test_has_as_many_parameters_as_its_docstring_says(self, name: str, options: dict, matrices: float, more: int):
        m = BASELINES[name](64, 4, **options)
        assert sum(p.numel() for p in m.parameters()) == matrices * 64**2 + more

    def test_memory_spans_of_fresh_layers_are_the_published_ones(self):
        torch.manual_seed(0)
        mamba2, rwkv6 = BASELINES["mamba2"](64, 64), BASELINES["rwkv6"](64, 4)
        step, rate = F.softplus(mamba2.step_bias), mamba2.log_rate.exp()
        assert 0.001 <= step.min() < 0.002 and 0.06 < step.max() <= 0.1
        assert 1 <= rate.min() < 2 and 14 < rate.max() <= 16
        assert rwkv6.decay_bias[0] == -6 and rwkv6.decay_bias[-1] == -1
        assert rwkv6.bonus.flatten()[:3].tolist() == pytest.approx([0, 0.1, -0.1])
