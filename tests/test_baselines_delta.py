"""DeltaNet, Gated DeltaNet and RWKV-7 against their published recurrences, token by token, and the rule behind them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, outcome, stir, tokens
from published import convolved, heads_of, rms, unit_length
from published import delta_rule as naive_delta_rule
from torch import Tensor

from femixer.baselines import RWKV7, DeltaNet, GatedDeltaNet
from femixer.baselines.kernels.chunks import DELTA_CHUNK as CHUNK
from femixer.baselines.kernels.chunks import LEAST_GATE, delta_rule, unit
from femixer.layout import Past, arrange

EXACT = 1e-10
BATCH, HEADS, E, D = 2, 3, 7, 5


def rule(q, k, v, c, b, gate, layout, state=None) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other: R = exp(gate) S, S = R + b (cᵀ R) + k vᵀ, y = Sᵀ q."""
    s = v.new_zeros(BATCH, HEADS, E, D) if state is None else state
    outputs = []
    for t in range(q.shape[1]):

        def here(x: Tensor, t: int = t) -> Tensor:
            return x[:, t][..., None]

        start = layout.starts[:, t].view(-1, 1, 1, 1) if layout.starts is not None else torch.tensor(False)
        padding = layout.padding[:, t].view(-1, 1, 1, 1) if layout.padding is not None else torch.tensor(False)
        r = torch.where(start, 0, s)
        if gate is not None:
            r = r * (here(gate)[..., None] if gate.dim() == 3 else here(gate)).exp()
        along = -here(k) if b is None else here(b)
        after = r + along @ (here(c).mT @ r) + here(k) @ here(v).mT
        s = torch.where(padding, s, after)
        outputs.append((after.mT @ here(q))[..., 0])
    return torch.stack(outputs, 1), s


def ingredients(kind: str, length: int, seed: int = 0) -> dict[str, Tensor | None]:
    """Unit keys and what the three layers make of them."""
    draws = (noise(BATCH, length, HEADS, width, seed=10 * seed + i) for i, width in enumerate((E, E, E, D, E, 1)))
    q, k, other, v, a, beta = draws
    q, k, other, a, beta = unit(q), unit(k), unit(other), a.sigmoid(), beta.sigmoid()
    if kind == "channel":
        gate = LEAST_GATE * a.flip(-1) ** 8
        gate[:, ::3] = LEAST_GATE
        return {"q": q, "k": k, "v": v, "c": other, "b": -a * other, "gate": gate}
    # From hardly any decay to forgetting all at once.
    gate = -torch.logspace(-4, 2, length * HEADS, dtype=torch.float64)[noise(length * HEADS).argsort()]
    gate = gate.view(1, length, HEADS).expand(BATCH, -1, -1).clone()
    return {"q": q, "k": k, "v": beta * v, "c": beta * k, "b": None, "gate": gate if kind == "head" else None}


KINDS = pytest.mark.parametrize("kind", ["none", "head", "channel"])
LENGTHS = pytest.mark.parametrize("length", [1, 2, CHUNK, 2 * CHUNK + 5])


def layout_of(length: int, marked: bool = False):
    """A layout without marks, or one whose rows start segments and end in padding."""
    x = torch.zeros(BATCH, length, 1)
    if not marked:
        return arrange(x, None, None, Past())[0]
    ids = torch.arange(length) // 11
    ids = torch.stack([torch.where(torch.arange(length) < length - 3, ids, -1), (ids + 6) // 4])
    return arrange(x, None, ids, Past())[0]


class TestRule:
    @KINDS
    @LENGTHS
    @pytest.mark.parametrize("marked", [False, True])
    def test_chunks_are_the_recurrence_with_gradients(self, kind: str, length: int, marked: bool):
        given = ingredients(kind, length)
        layout, state = layout_of(length, marked), noise(BATCH, HEADS, E, D, seed=99)
        names = [name for name, x in given.items() if x is not None]
        results = []
        for run, where in ((delta_rule, {"marks": layout.marks()}), (rule, {"layout": layout})):
            leaves = {name: x if x is None else x.clone().requires_grad_() for name, x in given.items()}
            start = state.clone().requires_grad_()
            y, last = run(**leaves, **where, state=start)
            y = y if layout.padding is None else y.masked_fill(layout.padding[..., None, None], 0)
            total = (y * noise(*y.shape, seed=5)).sum() + (last * noise(*last.shape, seed=6)).sum()
            gradients = torch.autograd.grad(total, [start, *(leaves[name] for name in names)])
            results.append(
                {"y": y.detach(), "last": last.detach(), **dict(zip(["state", *names], gradients, strict=True))}
            )
        assert_close(*results, EXACT)

    @KINDS
    def test_float32_is_close_at_length_1000(self, kind: str):
        given = ingredients(kind, 1000)
        layout = layout_of(1000)
        single = {name: x if x is None else x.float() for name, x in given.items()}
        wanted, last = rule(**{name: x if x is None else x.double() for name, x in single.items()}, layout=layout)
        y, after = delta_rule(**single)
        assert y.dtype == after.dtype == torch.float32
        assert_close({"y": y, "state": after}, {"y": wanted, "state": last}, 2e-6)

    def test_one_key_again_and_again_stays_exact(self):
        """The hardest system: every token erases what the one before wrote, and only the last value remains."""
        length = 200
        key = unit(noise(1, 1, 1, E)).expand(1, length, 1, E).float()
        v = noise(1, length, 1, D).float()
        y, state = delta_rule(key, key, v, key, None, None)
        assert_close({"y": y, "state": state}, {"y": v, "state": key[0, -1, 0, :, None] * v[:, -1, :, None]}, 1e-4)

    def test_unit_vectors_have_length_one_and_zero_has_a_gradient(self):
        x = noise(3, 5).requires_grad_()
        assert_close({"length": unit(x).norm(dim=-1)}, {"length": torch.ones(3, dtype=x.dtype)}, 1e-5)
        nothing = torch.zeros(2, 5, requires_grad=True)
        unit(nothing).sum().backward()
        assert nothing.grad.isfinite().all()


def deltanet(m: DeltaNet, x: Tensor) -> Tensor:
    qkv, beta = m.in_proj(x).split((3 * m.dim, m.heads), -1)
    parts = F.silu(convolved(qkv, m.convolution.weight)).chunk(3, -1)
    q, k, v = (heads_of(part, m.heads) for part in parts)
    y, _ = naive_delta_rule(unit_length(q), unit_length(k), v, beta.sigmoid(), torch.ones_like(k[..., :1]))
    return m.out_proj(rms(y, m.norm.weight).flatten(2))


def gated_deltanet(m: GatedDeltaNet, x: Tensor) -> Tensor:
    qkv, g, alpha, beta = m.in_proj(x).split(m.widths, -1)
    parts = F.silu(convolved(qkv, m.convolution.weight)).split(m.streams, -1)
    q, k, v = (heads_of(part, m.heads) for part in parts)
    alpha = (-m.log_rate.exp() * (1 + (alpha + m.step_bias).exp()).log()).exp()
    y, _ = naive_delta_rule(unit_length(q), unit_length(k), v, beta.sigmoid(), alpha[..., None])
    return m.out_proj(rms(y, m.norm.weight).flatten(2) * F.silu(g))


def rwkv7(m: RWKV7, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    xr, xd, xk, xv, xa, xg = (torch.lerp(x, before, mu.expand_as(x)) for mu in m.shifts)
    r, k, v = m.receptance_proj(xr), m.key_proj(xk), m.value_proj(xv)
    d = m.decay_up.bias + torch.tanh(xd @ m.decay_down.weight.T) @ m.decay_up.weight.T
    w = torch.exp(-math.exp(-0.5) * d.sigmoid())
    a = (m.rate_up.bias + xa @ m.rate_down.weight.T @ m.rate_up.weight.T).sigmoid()
    g = (xg @ m.gate_down.weight.T).sigmoid() @ m.gate_up.weight.T
    kappa, k = k * m.removal, k * torch.lerp(torch.ones_like(a), a, m.replacement.expand_as(a))
    r, w, k, v, kappa, a = (heads_of(part, m.heads) for part in (r, w, k, v, kappa, a))
    kappa = unit_length(kappa)
    s = x.new_zeros(x.shape[0], m.heads, v.shape[-1], k.shape[-1])  # as in the publication: values first
    y = []
    for t in range(x.shape[1]):
        change = torch.diag_embed(w[:, t]) - torch.einsum("bhe,bhf->bhef", kappa[:, t], a[:, t] * kappa[:, t])
        s = s @ change + torch.einsum("bhd,bhe->bhde", v[:, t], k[:, t])
        read = torch.einsum("bhde,bhe->bhd", s, r[:, t])
        centred = read - read.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5 * read.shape[-1]).sqrt()
        normal = normal.flatten(1) * m.norm.weight + m.norm.bias
        bonus = (r[:, t] * m.bonus * k[:, t]).sum(-1, keepdim=True) * v[:, t]
        y.append(g[:, t] * (normal + bonus.flatten(1)))
    return m.out_proj(torch.stack(y, 1))


LAYERS = {
    "deltanet": (DeltaNet, {}, deltanet),
    "deltanet-bias": (DeltaNet, {"conv_width": 2, "bias": True}, deltanet),
    "gated-deltanet": (GatedDeltaNet, {}, gated_deltanet),
    "gated-deltanet-published": (GatedDeltaNet, {"expand_k": 0.75, "expand_v": 1.5}, gated_deltanet),
    "rwkv7": (RWKV7, {}, rwkv7),
    "rwkv7-ranks": (RWKV7, {"decay_rank": 2, "rate_rank": 3, "gate_rank": 5, "bias": True}, rwkv7),
}


class TestLayers:
    @pytest.mark.parametrize("name", LAYERS)
    def test_the_layer_is_its_published_recurrence(self, name: str):
        kind, options, published = LAYERS[name]
        m = stir(kind(24, 3, dtype=torch.float64, **options))
        x = tokens(batch=2, length=CHUNK + 5)
        assert_close(outcome(m, m, x), outcome(m, lambda x: published(m, x), x), EXACT)

    def test_memory_spans_start_as_published(self):
        torch.manual_seed(0)
        m = GatedDeltaNet(64, 32)
        step = F.softplus(m.step_bias)
        assert 0.9e-3 < step.min() < 1e-2 < step.max() < 0.11
        assert 0 < m.log_rate.exp().min() < 4 < 12 < m.log_rate.exp().max() < 16
        spans = 1 / (math.exp(-0.5) * RWKV7(64, 4).decay_up.bias.sigmoid())
        assert spans.min() < 3
        assert spans.max() > 1000

    def test_a_key_is_overwritten_not_added_to(self):
        """With beta = 1 and one key, DeltaNet reads the last value alone; linear attention would read the sum."""
        m = DeltaNet(8, 1, dtype=torch.float64)
        with torch.no_grad():
            m.in_proj.weight.zero_()
            m.convolution.weight.zero_()
            m.convolution.weight[0] = 1
            m.in_proj.weight[0, 0] = m.in_proj.weight[8, 0] = 1e3  # one key for all tokens that have channel 0
            m.in_proj.weight[16:24, 1:].fill_diagonal_(1)
            m.in_proj.weight[24, 0] = 1e3
            m.out_proj.weight.copy_(torch.eye(8))
        x = tokens(batch=2, length=6, dim=8)
        x[..., 0] = 1
        alone = torch.cat([m(x[:, t : t + 1]) for t in range(6)], 1)
        assert_close({"y": m(x)}, {"y": alone}, 1e-6)
