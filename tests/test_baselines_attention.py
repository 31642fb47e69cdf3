"""Rivals that change softmax attention, and KDA, against their published definitions written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, outcome, stir, tokens
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.baselines import KDA, Attention, FoX, GatedAttention, PaTH
from femixer.baselines.attention import CHUNK
from femixer.baselines.kernels.chunks import delta_rule

EXACT = 1e-10


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def unit_length(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """silu of sum_j weight[j] x_{t-j}."""
    before = [F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] * taps for j, taps in enumerate(weight)]
    return F.silu(sum(before))


def read(scores: list[list[Tensor]], v: Tensor) -> Tensor:
    """Softmax over the scores [B, H] of tokens up to t, times the values [B, T, H, E]."""
    rows = [torch.einsum("bhs,bshe->bhe", torch.stack(row, -1).softmax(-1), v[:, : len(row)]) for row in scores]
    return torch.stack(rows, 1)


def gated_attention(m: GatedAttention, x: Tensor) -> Tensor:
    q, k = m.query_key_proj(x).split((m.heads * m.width, m.kv_heads * m.width), -1)
    q, k, v = heads_of(q, m.heads), heads_of(k, m.kv_heads), heads_of(m.value_proj(x), m.kv_heads)
    k, v = (part.repeat_interleave(m.heads // m.kv_heads, 2) for part in (k, v))
    scores = [[(q[:, t] * k[:, i]).sum(-1) / math.sqrt(m.width) for i in range(t + 1)] for t in range(x.shape[1])]
    gate = 1 / (1 + torch.exp(-m.gate_proj(x)))
    gate = gate.repeat_interleave(m.heads * m.width // gate.shape[-1], -1)
    return m.out_proj(gate * read(scores, v).flatten(2))


def fox(m: FoX, x: Tensor) -> Tensor:
    q, k, v, f = m.in_proj(x).split((*[m.heads * m.width] * 3, m.heads), -1)
    f = torch.sigmoid(f - m.prior.decay_bias)
    if m.pro:
        alpha = m.shift_proj(x).sigmoid()
        for name, a in zip(("k", "v"), alpha.chunk(2, -1), strict=True):
            u = k if name == "k" else v
            a = a.repeat_interleave(m.width, -1)
            u = a * F.pad(u, (0, 0, 1, 0))[:, :-1] + (1 - a) * u
            k, v = (u, v) if name == "k" else (k, u)
    q, k, v = (heads_of(part, m.heads) for part in (q, k, v))
    if m.pro:
        q, k = rms(q, m.query_norm.scale, 1e-6), rms(k, m.key_norm.scale, 1e-6)
    scores = []
    for t in range(x.shape[1]):
        kept = [f[:, i + 1 : t + 1].log().sum(1) for i in range(t + 1)]
        scores.append([(q[:, t] * k[:, i]).sum(-1) / math.sqrt(m.width) + kept[i] for i in range(t + 1)])
    o = read(scores, v)
    if m.pro:
        o = rms(o, m.norm.scale, 1e-6) * heads_of(m.gate_proj(x).sigmoid(), m.heads)
    return m.out_proj(o.flatten(2))


def path(m: PaTH, x: Tensor) -> Tensor:
    qkv, low = m.in_proj(x).split(m.widths, -1)
    q, k, v = (heads_of(part, m.heads) for part in qkv.chunk(3, -1))
    w = unit_length(heads_of(convolved(m.map_proj(low), m.convolution.weight), m.heads))
    beta = 2 * m.beta_proj(x).sigmoid()
    identity = torch.eye(w.shape[-1], dtype=w.dtype)
    maps = identity - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    scores = []
    for t in range(x.shape[1]):
        row, product = [], identity.expand_as(maps[:, 0])
        for i in range(t, -1, -1):  # H_t ... H_{i+1}
            row.append(torch.einsum("bhe,bhef,bhf->bh", q[:, t], product, k[:, i]) * q.shape[-1] ** -0.5)
            product = product @ maps[:, i]
        scores.append(row[::-1])
    return m.out_proj(read(scores, v).flatten(2))


def kda(m: KDA, x: Tensor) -> Tensor:
    qkv, b, low, gate = m.in_proj(x).split(m.widths, -1)
    q, k, v = (heads_of(part, m.heads) for part in convolved(qkv, m.convolution.weight).chunk(3, -1))
    q, k, beta = unit_length(q), unit_length(k), b.sigmoid()
    steps = torch.log1p((m.decay_proj(low) + m.step_bias).exp())
    alpha = torch.exp(-m.log_rate.exp()[:, None] * heads_of(steps, m.heads))
    s, y = x.new_zeros(x.shape[0], m.heads, k.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        s = alpha[:, t, :, :, None] * s
        error = v[:, t] - torch.einsum("bhed,bhe->bhd", s, k[:, t])
        s = s + torch.einsum("bh,bhe,bhd->bhed", beta[:, t], k[:, t], error)
        y.append(torch.einsum("bhed,bhe->bhd", s, q[:, t]))
    o = rms(torch.stack(y, 1), m.norm.weight, 1e-5).flatten(2) * m.gate_proj(gate).sigmoid()
    return m.out_proj(o)


LAYERS = {
    "gated-attention": (GatedAttention, {"rope": False}, gated_attention),
    "gated-attention-headwise": (GatedAttention, {"rope": False, "gate": "headwise", "kv_heads": 1}, gated_attention),
    "fox": (FoX, {}, fox),
    "fox-llama": (FoX, {"variant": "llama", "expand": 1.5}, fox),
    "path": (PaTH, {}, path),
    "path-options": (PaTH, {"rank": 5, "conv_width": 2, "bias": True}, path),
    "kda": (KDA, {}, kda),
    "kda-options": (KDA, {"rank": 5, "conv_width": 2, "bias": True}, kda),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_its_published_definition(name: str):
    kind, options, published = LAYERS[name]
    m = stir(kind(12, 3, dtype=torch.float64, **options))
    x = tokens(batch=2, length=CHUNK + 3 if name == "path" else 37 if kind is KDA else 11, dim=12)
    assert_close(outcome(m, m, x), outcome(m, lambda x: published(m, x), x), EXACT)


def test_an_open_gate_is_attention_and_its_start_halves_it():
    m = GatedAttention(24, 4, expand=1.0, dtype=torch.float64)
    plain = Attention(24, 4, bias=False, dtype=torch.float64)
    plain.load_state_dict({name: p for name, p in m.state_dict().items() if not name.startswith("gate")})
    with torch.no_grad():
        m.gate_proj.weight.zero_()
    assert_close({"y": 2 * m(tokens())}, {"y": plain(tokens())}, EXACT)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_is_the_mixer_without_parts(kv_heads: int, causal: bool, rope: bool):
    options = {"kv_heads": kv_heads, "causal": causal, "rope": rope, "dtype": torch.float64}
    attention, mixer = stir(Attention(24, 6, **options)), FreeEnergyMixer(24, 6, parts="", **options)
    mixer.load_state_dict(dict(zip(mixer.state_dict(), attention.state_dict().values(), strict=True)))
    assert_close({"y": attention(tokens())}, {"y": mixer(tokens())}, EXACT)


def test_a_reflection_turns_a_key_over():
    """By hand: with beta = 2 and w along a key, one step in between makes its score the negative."""
    from femixer.baselines.attention import path_attention

    e = torch.tensor([1.0, 0.0], dtype=torch.float64)
    q = k = w = e.view(1, 1, 1, 2).expand(1, 1, 3, 2)
    v = torch.eye(3, 2, dtype=torch.float64).view(1, 1, 3, 2)
    beta = torch.tensor([[[0.0, 2.0, 0.0]]], dtype=torch.float64)
    y, keys, _ = path_attention(q, k, v, w, beta, k[:, :, :0], v[:, :, :0], None)
    s = 1 / math.sqrt(2)
    weights = [torch.tensor(row, dtype=torch.float64).softmax(0) for row in ([s], [-s, s], [-s, s, s])]
    expected = torch.stack([row @ v[0, 0, : len(row)] for row in weights])
    assert_close({"y": y[0, 0], "keys": keys[0, 0, :, 0]}, {"y": expected, "keys": torch.tensor([-1.0, 1, 1])}, EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steep_decays_of_channels_are_exact(dtype: torch.dtype):
    """Gates from hardly any decay to -100 a token, where a quotient of sums has nothing left."""
    shape = 1, 75, 2, 5
    q, k, v, logits = (noise(*shape, seed=i) for i in range(4))
    k, beta = unit_length(k), torch.sigmoid(noise(1, 75, 2, 1, seed=4))
    gate = -(10.0 ** (2 * torch.tanh(logits)))
    s, rows = torch.zeros(1, 2, 5, 5, dtype=torch.float64), []
    for t in range(75):
        s = gate[:, t, :, :, None].exp() * s
        error = v[:, t] - torch.einsum("bhed,bhe->bhd", s, k[:, t])
        s = s + torch.einsum("bhe,bhd->bhed", beta[:, t] * k[:, t], error)
        rows.append(torch.einsum("bhed,bhe->bhd", s, q[:, t]))
    given = (x.to(dtype) for x in (q, k, beta * v, beta * k))
    y, last = delta_rule(*given, None, gate.to(dtype), steep=True)
    tolerance = EXACT if dtype == torch.float64 else 5e-6
    assert_close({"y": y, "state": last}, {"y": torch.stack(rows, 1), "state": s}, tolerance)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Attention, {"kv_heads": 2}, "kv_heads=2"),
        (Attention, {"dim": 15}, "dim=15"),
        (GatedAttention, {"gate": "channel"}, "gate='channel'"),
        (GatedAttention, {"expand": 0.0}, "expand=0.0"),
        (FoX, {"variant": "max"}, "variant='max'"),
        (FoX, {"expand": -1.0}, "expand=-1.0"),
        (PaTH, {"rank": 0}, "rank=0"),
        (PaTH, {"conv_width": 1.5}, "conv_width=1.5"),
        (KDA, {"rank": 0}, "rank=0"),
        (KDA, {"conv_width": 0}, "conv_width=0"),
    ],
)
def test_wrong_options_are_named(kind: type, options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        kind(**{"dim": 24, "heads": 3, **options})
