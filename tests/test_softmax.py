"""The softmax prior: rotary positions, equality with standard attention, windows, biases, the exact read, the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, oracle, reads_of, stir, streamed, tokens
from torch import Tensor, nn

from femixer import FreeEnergyMixer
from femixer.kernels import attend, blocked
from femixer.kernels.softmax import softmax_read
from femixer.layout import Past
from femixer.priors import Alibi
from femixer.rotary import rotary_angles, rotate
from femixer.state import SPARE


class TestRotary:
    def test_rotation_is_a_rotation(self):
        """Orthogonal for every position: norms and inner products at one position are kept."""
        x, other = noise(2, 11, 3, 10), noise(2, 11, 3, 10, seed=1)
        cos, sin = rotary_angles(torch.arange(11)[None], 10, 10000.0, torch.float64)
        turned = rotate(x, cos, sin)
        assert_close({"norm": turned.norm(dim=-1)}, {"norm": x.norm(dim=-1)}, 1e-14)
        assert_close({"product": (turned * rotate(other, cos, sin)).sum(-1)}, {"product": (x * other).sum(-1)}, 1e-14)
        assert torch.equal(turned[:, 0], x[:, 0])
        assert (turned[:, 1:] - x[:, 1:]).abs().amin((0, 1, 2)).min() > 0

    def test_positions_add_up(self):
        x = noise(2, 1, 3, 10)
        first, second, both = (rotary_angles(torch.tensor([[t]]), 10, 10000.0, torch.float64) for t in (4, 9, 13))
        assert_close({"x": rotate(rotate(x, *first), *second)}, {"x": rotate(x, *both)}, 1e-14)

    def test_each_pair_turns_by_its_own_frequency(self):
        cos, sin = rotary_angles(torch.tensor([[0, 1, 7]]), 6, 100.0, torch.float64)
        for t, position in enumerate((0, 1, 7)):
            for i in range(3):
                angle = position * 100.0 ** (-2 * i / 6)
                assert cos[0, t, 0, i] == pytest.approx(math.cos(angle), abs=1e-15)
                assert sin[0, t, 0, i] == pytest.approx(math.sin(angle), abs=1e-15)

    def test_scores_depend_on_distance_only(self):
        q, k = noise(1, 1, 1, 8).expand(1, 13, 1, 8), noise(1, 1, 1, 8, seed=1).expand(1, 13, 1, 8)
        cos, sin = rotary_angles(torch.arange(13)[None], 8, 10000.0, torch.float64)
        scores = torch.einsum("bthe,bshe->ts", rotate(q, cos, sin), rotate(k, cos, sin))
        for distance in range(-12, 13):
            diagonal = scores.diagonal(distance)
            assert diagonal.max() - diagonal.min() < 1e-13
        assert scores[0].unique().numel() == 13

    @pytest.mark.parametrize("position", [16_383, 1_000_000])
    def test_angles_are_exact_far_out(self, position: int):
        cos, sin = rotary_angles(torch.tensor([[position]]), 64, 10000.0, torch.float32)
        for i in range(32):
            angle = position * 10000.0 ** (-2 * i / 64)
            assert cos[0, 0, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[0, 0, 0, i].item() == pytest.approx(math.sin(angle), abs=1e-7)

    @pytest.mark.parametrize("kind", ["plain", "mask"])
    def test_a_stream_far_out_reads_as_at_the_beginning(self, kind: str):
        m, x = stir(FreeEnergyMixer(24, 3)), tokens(dtype=torch.float32)
        _, start = m(x[:, :1], return_state=True)
        far = Past(1_000_000)
        if kind == "mask":
            zero = torch.zeros(3, dtype=torch.long)
            far = Past(1_000_000, zero, zero, zero + 1_000_000)
        start = replace(start, past=far, prior=None, conditioner=None)
        keep = {"mask": torch.ones(x.shape[:2], dtype=torch.bool)} if kind == "mask" else {}
        with torch.no_grad():
            first, state = m(x[:, :9], state=start, return_state=True, **keep and {"mask": keep["mask"][:, :9]})
            assert state.past.seen == 1_000_009
            rest = streamed_from(m, x[:, 9:], state)
        assert_close({"y": torch.cat([first, rest], 1)}, {"y": m(x)}, 2e-5)


def streamed_from(m: FreeEnergyMixer, x: Tensor, state: object) -> Tensor:
    outputs = []
    for part in x.split(1, 1):
        y, state = m(part, state=state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, 1)


class TestStandardAttention:
    """parts="" is standard attention, with its parameters and to its digits."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("rope", [True, False])
    @pytest.mark.parametrize("kv_heads", [6, 2])
    def test_scaled_dot_product_attention(self, causal: bool, rope: bool, kv_heads: int):
        m = FreeEnergyMixer(48, 6, parts="", causal=causal, rope=rope, kv_heads=kv_heads)
        stir(m)
        x = tokens(dim=48, length=37, dtype=torch.float32)
        q, k = (m.prior_proj(x)[name].unflatten(-1, (-1, 8)) for name in "qk")
        v = m.value_proj(x)["v"].unflatten(-1, (-1, 8))
        if rope:
            cos, sin = rotary_angles(torch.arange(37)[None], 8, 10000.0, torch.float32)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(2)
        assert_close({"y": m(x)}, {"y": m.out_proj(out)}, 1e-6)

    @pytest.mark.parametrize("causal", [True, False])
    def test_multihead_attention_of_torch(self, causal: bool):
        attention = nn.MultiheadAttention(24, 3, batch_first=True)
        m = FreeEnergyMixer(24, 3, parts="", causal=causal, rope=False)
        assert sum(p.numel() for p in m.parameters()) == sum(p.numel() for p in attention.parameters())
        stir(m)
        with torch.no_grad():
            for suffix in ("weight", "bias"):
                pieces = [getattr(projection.linear, suffix) for projection in (m.prior_proj, m.value_proj)]
                getattr(attention, f"in_proj_{suffix}").copy_(torch.cat(pieces))
                getattr(attention.out_proj, suffix).copy_(getattr(m.out_proj, suffix))
        x = tokens(dtype=torch.float32)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
        wanted, _ = attention(x, x, x, need_weights=False, attn_mask=future)
        assert_close({"y": m(x)}, {"y": wanted}, 1e-6)

    def test_padding_of_torch(self):
        attention = nn.MultiheadAttention(24, 3, batch_first=True)
        m = stir(FreeEnergyMixer(24, 3, parts="", causal=False, rope=False))
        with torch.no_grad():
            for suffix in ("weight", "bias"):
                pieces = [getattr(projection.linear, suffix) for projection in (m.prior_proj, m.value_proj)]
                getattr(attention, f"in_proj_{suffix}").copy_(torch.cat(pieces))
                getattr(attention.out_proj, suffix).copy_(getattr(m.out_proj, suffix))
        x = tokens(dtype=torch.float32)
        keep = noise(*x.shape[:2]) > -0.5
        wanted, _ = attention(x, x, x, need_weights=False, key_padding_mask=~keep)
        assert_close({"y": m(x, mask=keep)[keep]}, {"y": wanted[keep]}, 1e-6)


class TestVisibility:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [1, 5, 23, 100])
    def test_a_window_is_what_is_less_than_window_tokens_away(self, causal: bool, window: int):
        m, x = stir(FreeEnergyMixer(24, 3, causal=causal, window=window, dtype=torch.float64)), tokens(batch=1)
        (inputs, *_), layout = m.prepare(x)
        p = m.prior.weights(inputs, layout)
        for t in range(23):
            for i in range(23):
                visible = abs(t - i) < window and (i <= t or not causal)
                assert (p[0, :, t, i] > 0).all() == visible

    def test_a_window_of_one_reads_the_token_itself(self):
        m, x = stir(FreeEnergyMixer(24, 3, parts="L", window=1, dtype=torch.float64)), tokens()
        assert_close({"y": m(x)}, {"y": m.out_proj(m.prepare(x)[0].v.flatten(2))}, 1e-12)

    def test_a_window_as_long_as_the_sequence_changes_nothing(self):
        m, x = stir(FreeEnergyMixer(24, 3, window=23, dtype=torch.float64)), tokens()
        wide = stir(FreeEnergyMixer(24, 3, dtype=torch.float64))
        assert_close({"y": m(x)}, {"y": wide(x)}, 1e-12)

    def test_windows_count_real_tokens(self):
        m, x = stir(FreeEnergyMixer(24, 3, window=4, dtype=torch.float64)), tokens(batch=1)
        keep = torch.ones(1, 23, dtype=torch.bool)
        keep[:, 5:15] = False
        (inputs, *_), layout = m.prepare(x, mask=keep)
        p = m.prior.weights(inputs, layout)
        assert [i for i in range(23) if p[0, 0, 16, i] > 0] == [3, 4, 15, 16]

    def test_alibi_is_its_definition(self):
        m = FreeEnergyMixer(
            24, 3, causal=False, rope=False, prior_options={"score_bias": Alibi(3)}, dtype=torch.float64
        )
        x = tokens()
        stir(m)
        (inputs, *_), layout = m.prepare(x)
        q, k = (inputs[name].unflatten(-1, (3, -1)).transpose(1, 2) for name in "qk")
        distance = torch.tensor([[abs(t - i) for i in range(23)] for t in range(23)])
        slopes = torch.tensor([2.0 ** (-8 / 3), 2.0 ** (-16 / 3), 2.0**-8], dtype=torch.float64)
        wanted = (q @ k.mT / math.sqrt(m.widths.key) - slopes[:, None, None] * distance).softmax(-1)
        assert_close({"p": m.prior.weights(inputs, layout)}, {"p": wanted}, 1e-12)

    def test_alibi_counts_the_real_tokens_of_a_segment(self):
        m = FreeEnergyMixer(24, 3, prior_options={"score_bias": Alibi(3)}, dtype=torch.float64)
        stir(m)
        x = tokens(batch=1)
        ids = torch.tensor([[1] * 6 + [2] * 5 + [-1] * 4 + [2] * 8])
        (inputs, *_), layout = m.prepare(x, segments=ids)
        later = m.prior.weights(inputs, layout)[..., 6:, 6:]
        (inputs, *_), layout = m.prepare(x[:, 6:], mask=ids[:, 6:] > 0)
        without = m.prior.weights(inputs, layout)
        real = (ids[0, 6:] > 0).nonzero()[:, 0]
        # Other features of the conditioner, the same positions: compare the biases by their effect on equal q and k.
        assert layout.position[0, real].tolist() == list(range(13))
        assert (later[..., real, :][..., real] > 0).equal(without[..., real, :][..., real] > 0)


class LearnedBias(nn.Module):
    """One learned number per head and distance."""

    def __init__(self, heads: int, furthest: int) -> None:
        super().__init__()
        self.table = nn.Parameter(noise(heads, furthest))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        distance = (query[:, :, None] - key[:, None]).abs().clamp(max=self.table.shape[1] - 1)
        return self.table[:, distance].transpose(0, 1)


class TestLearnedBias:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("size", [1.0, 300.0])
    def test_the_gradient_of_a_learned_score_bias_is_that_of_finite_differences(self, causal, window, size):
        bias = LearnedBias(2, 5)
        options = {"score_bias": bias}
        m = FreeEnergyMixer(8, 2, parts="LT", causal=causal, window=window, prior_options=options, dtype=torch.float64)
        table = bias.table.detach().clone()
        stir(m)
        assert "prior.score_bias.table" in dict(m.named_parameters())
        with torch.no_grad():
            m.value_proj.linear.weight.mul_(size)
        x = tokens(batch=2, length=7, dim=8)
        ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, -1, 2, 2, 2, 2]])
        weight = noise(2, 7, 8)

        def run(table: Tensor) -> Tensor:
            y = torch.func.functional_call(m, {"prior.score_bias.table": table}, (x,), {"segments": ids})
            return (y * weight).sum()

        assert torch.autograd.gradcheck(run, (table.requires_grad_(),), atol=1e-6 * size, rtol=1e-5)

    def test_a_stream_with_a_learned_bias_is_the_full_read(self):
        m = FreeEnergyMixer(8, 2, prior_options={"score_bias": LearnedBias(2, 50)}, dtype=torch.float64)
        stir(m)
        x = tokens(dim=8)
        assert_close({"y": streamed(m, x, [5, 1, 1, 9, 7])}, {"y": m(x)}, 1e-10)


# The kernel itself, in float64, against the definition.

GEOMETRIES: dict[str, dict] = {
    "causal": {},
    "encoder": {"causal": False},
    "window": {"window": 13},
    "encoder window": {"causal": False, "window": 13},
    "wide window": {"window": 200},
    "bias": {"bias": True},
    "encoder bias window": {"causal": False, "bias": True, "window": 70},
    "grouped": {"groups": 1},
    "grouped bias": {"groups": 2, "bias": True},
    "segments": {"runs": True},
    "encoder segments": {"runs": True, "causal": False},
    "segments window": {"runs": True, "window": 5},
    "encoder segments window bias grouped": {"runs": True, "causal": False, "window": 5, "bias": True, "groups": 1},
    "chunk": {"queries": 31},
    "one query": {"queries": 1},
    "chunk window": {"queries": 31, "window": 13},
    "chunk segments": {"queries": 31, "runs": True},
    "chunk segments window bias": {"queries": 31, "runs": True, "window": 5, "bias": True},
}
geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


class Case:
    """Random inputs of softmax_read for one geometry, and the same read by its definition."""

    def __init__(self, values: str = "tame", queries: int | None = None, groups: int = 4, length: int = 97, **geometry):
        heads, width, channels = 4, 6, 5
        queries = length if queries is None else queries
        self.geometry = {"causal": True, "window": None, "bias": None, "runs": None, **geometry}
        self.q, self.k = noise(2, queries, heads, width), noise(2, length, groups, width, seed=1)
        self.v, self.beta = noise(2, length, groups, channels, seed=2), noise(groups, channels, seed=3).exp()
        if values == "wild":
            index = torch.arange(length, dtype=torch.float64)
            self.v[..., 1] = (index * 40)[:, None]
            self.v[..., 2] = (-index * 40)[:, None]
            self.v[:, length * 2 // 3, :, 3] = 5e3
            self.v[..., 4] = 4e3 * (1 - 2 * (index % 2))[:, None]
        if self.geometry["bias"]:
            self.geometry["bias"] = noise(2, heads, queries, length, seed=4)
        if self.geometry["runs"]:
            run = torch.zeros(2, length, dtype=torch.long)
            run[0, 20:], run[0, 21:], run[0, 80:] = 1, 2, 3
            run[1, 50:] = 1
            run[0, :4] = run[0, 30:36] = run[1, -9:] = run[1, 48:53] = -1
            self.geometry["runs"] = run[:, length - queries :], run

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (self.q, self.k, self.v, self.beta)] + (
            [] if self.geometry["bias"] is None else [self.geometry["bias"].clone().requires_grad_()]
        )

    def fast(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, bias: Tensor | None = None):
        return softmax_read(q, k, v, beta, **{**self.geometry, "bias": bias})

    def prior(self, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
        """p [B, H, T, S] in plain torch."""
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        (t, s), window = scores.shape[-2:], self.geometry["window"]
        visible = torch.zeros(q.shape[0], t, s, dtype=torch.bool)
        for b in range(q.shape[0]):
            run = self.geometry["runs"][1][b].tolist() if self.geometry["runs"] else [0] * s
            rank = [sum(r >= 0 for r in run[:i]) for i in range(s)]
            for row in range(t):
                at = row + s - t
                for i in range(s):
                    near = window is None or abs(rank[at] - rank[i]) < window
                    future = self.geometry["causal"] and i > at
                    visible[b, row, i] = run[at] >= 0 and run[i] == run[at] and near and not future
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        return scores.softmax(-1).masked_fill(~visible[:, None], 0)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, bias: Tensor | None = None):
        return reads_of(self.prior(q, k, bias), v, beta)


def with_gradients(read: Callable, case: Case, with_beta: bool = True) -> dict[str, Tensor]:
    q, k, v, beta, *bias = case.leaves()
    mean, free = read(q, k, v, beta if with_beta else None, *bias)
    loss = (mean * noise(*mean.shape, seed=5)).sum()
    leaves = {"q": q, "k": k, "v": v, **({"bias": bias[0]} if bias else {})}
    if with_beta:
        loss = loss + (free * noise(*free.shape, seed=6)).sum()
        leaves["beta"] = beta
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    reads = {"mean": mean.detach(), **({"free": free.detach()} if with_beta else {})}
    return {**reads, **{f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}}


@pytest.fixture
def reads_by_blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which functions of the exact path were called."""
    calls: list[str] = []
    for name in ("free_energy", "gradients"):

        def spied(name: str, inner: Callable) -> Callable:
            def call(*args):
                calls.append(name)
                return inner(*args)

            return call

        monkeypatch.setattr(blocked, name, spied(name, getattr(blocked, name)))
    return calls


class TestExactRead:
    @geometries
    def test_the_one_pass_read_is_the_definition(self, geometry: dict, reads_by_blocked: list[str]):
        case = Case(**geometry)
        assert_close(with_gradients(case.fast, case), with_gradients(case.plain, case), 1e-10)
        assert "free_energy" not in reads_by_blocked

    @geometries
    def test_the_mean_alone_is_the_definition(self, geometry: dict):
        case = Case(**geometry)
        fast, plain = (with_gradients(read, case, with_beta=False) for read in (case.fast, case.plain))
        assert_close(fast, plain, 1e-10)

    @geometries
    def test_the_blocked_read_is_the_definition_for_values_of_any_range(self, geometry, reads_by_blocked):
        case = Case("wild", **geometry)
        fast, plain = (with_gradients(read, case) for read in (case.fast, case.plain))
        assert_close(fast, plain, 1e-9)
        one_pass_suffices = geometry in ({"causal": False}, {"queries": 1})
        if not one_pass_suffices:
            assert reads_by_blocked.count("free_energy") > 0
            assert reads_by_blocked.count("gradients") > 0

    @geometries
    def test_one_pass_and_blocked_agree_where_both_apply(self, geometry: dict, reads_by_blocked: list[str]):
        """A further channel, wide and cold, sends every head to the blocked read; the others must not notice."""
        case = Case(**geometry)
        one_pass = with_gradients(case.fast, case)
        assert "free_energy" not in reads_by_blocked

        def beside_a_cold_channel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *bias: Tensor):
            cold = 1e3 * noise(*v.shape[:-1], 1, seed=9)
            mean, free = case.fast(q, k, torch.cat([v, cold], -1), F.pad(beta, (0, 1), value=0.01), *bias)
            return mean[..., :-1], free[..., :-1]

        assert_close(with_gradients(beside_a_cold_channel, case), one_pass, 1e-10)
        assert {"free_energy", "gradients"} <= set(reads_by_blocked)

    def test_small_values_at_small_temperatures_stay_on_the_fast_path(self, reads_by_blocked: list[str]):
        case = Case()
        case.v, case.beta = 0.1 * case.v, 0.02 * case.beta
        assert_close(with_gradients(case.fast, case), with_gradients(case.plain, case), 1e-10)
        assert not reads_by_blocked

    def test_exact_on_both_sides_of_where_sums_become_too_small(self):
        """Head h has a future value 16 + 4 h nats above the others; the smallest float32 is exp(-87)."""
        heads, length = 20, 211
        q, k = noise(1, length, heads, 6, dtype=torch.float32), noise(1, length, heads, 6, seed=1, dtype=torch.float32)
        beta = torch.tensor([[0.1, 0.3, 1.0]]).expand(heads, 3).contiguous()
        v = 0.5 * noise(1, length, heads, 3, seed=2, dtype=torch.float32)
        v[:, -1] = (16 + 4 * torch.arange(heads))[:, None] / beta
        _, free = softmax_read(q, k, v, beta)
        scores = torch.einsum("bthe,bshe->bhts", q.double(), k.double()) / math.sqrt(6)
        p = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        _, wanted = reads_of(p, v.double(), beta.double())
        assert ((free - wanted).abs() / wanted.abs().clamp(min=1))[:, :-1].max() <= 1e-5

    def test_only_heads_that_need_it_are_read_again(self, monkeypatch):
        case = Case()
        case.v[1, 60, 2, 0] = 1e6
        seen = []
        inner = blocked.free_energy
        monkeypatch.setattr(blocked, "free_energy", lambda s: seen.append(s.q.shape[0]) or inner(s))
        case.fast(case.q, case.k, case.v, case.beta)
        assert seen == [1]

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [None, 3, 100, 700])
    def test_blocks_of_keys_and_rows_cover_everything_once(self, causal: bool, window: int | None):
        """More tokens than a block of keys (512) and of rows (64) holds."""
        n, m = 601, 1187
        q, k, v, beta = noise(1, n, 3), noise(1, m, 3, seed=1), 300 * noise(1, m, 2, seed=2), noise(1, 2).exp()
        s = blocked.Sequences(q, k, v, beta, None, causal, window, 0.4)
        row, key = torch.arange(m - n, m)[:, None], torch.arange(m)
        visible = torch.ones(n, m, dtype=torch.bool)
        visible &= (key <= row) | torch.tensor(not causal)
        if window is not None:
            visible &= (row - key).abs() < window
        p = (s.q @ s.k.mT * 0.4).masked_fill(~visible, -torch.inf).softmax(-1)
        _, wanted = reads_of(p[:, None], s.v[:, :, None], s.beta)
        assert_close({"F": blocked.free_energy(s)}, {"F": wanted[:, :, 0]}, 1e-11)

    @pytest.mark.parametrize("size", [1e10, 1e30])
    @pytest.mark.parametrize("scores", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize("geometry", [{}, {"causal": False}, {"window": 5}, {"runs": True}, {"queries": 1}])
    def test_any_finite_input_gives_finite_results_between_mean_and_maximum(self, size, scores, geometry):
        case = Case(**geometry)
        q, k, v, beta = (
            x.float().requires_grad_() for x in (scores * case.q, scores * case.k, size * case.v, case.beta)
        )
        mean, free = case.fast(q, k, v, beta)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        bottom, top = (f(v, 1, keepdim=True) for f in (torch.amin, torch.amax))
        rounding = 1e-5 * size
        assert (mean <= free + rounding).all()
        assert (free <= top.clamp(min=0) + rounding).all()
        assert (mean >= bottom.clamp(max=0) - rounding).all()
        for gradient in torch.autograd.grad(free.sum() / size, (q, k, v, beta)):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("values", [0.0, 3.7, -1e4, 1e30])
    def test_constant_values_are_read_as_themselves(self, values: float):
        q, k = noise(2, 50, 2, 4, dtype=torch.float32), noise(2, 50, 2, 4, seed=1, dtype=torch.float32)
        v = torch.full((2, 50, 2, 3), values)
        mean, free = softmax_read(q, k, v, torch.tensor([[0.02, 1.0, 30.0]]).expand(2, 3).contiguous())
        assert ((free - values).abs() <= 1e-6 * max(1.0, abs(values))).all()
        assert ((mean - values).abs() <= 1e-6 * max(1.0, abs(values))).all()


class TestLongSequence:
    def test_exact_at_16384_tokens(self):
        """Head 0 stays on the fast path; head 1 has ramps, a giant in the future, +-1e4 and small temperatures."""
        length, width = 16384, 7
        m = FreeEnergyMixer(32, 2, parts="L", value_dim=2 * width)
        stir(m)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(0.7 * tokens(batch=1, length=length, dim=32, dtype=torch.float32))
        index = torch.arange(length)
        ramp = torch.linspace(-1, 1, length)
        beta = torch.tensor([[0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 1.9], [1.0, 0.5, 3.0, 1.0, 0.02, 0.02, 2.0]])
        random = noise(length, dtype=torch.float32)
        v[0, :, 0] = noise(length, width, seed=1, dtype=torch.float32)
        patterns = [
            1e4 * ramp,
            -2e4 * ramp,
            torch.where(index == 12000, torch.tensor(1e4 / 3), random),
            1e4 * (1.0 - 2 * (index % 2)),
            1e-3 * random,
            300 * random,
            torch.full((length,), 5e3),
        ]
        v[0, :, 1] = torch.stack(patterns, -1)
        with torch.no_grad():
            mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
        assert free.isfinite().all()
        rows = torch.tensor([0, 1, 63, 64, 511, 4097, 8191, 11999, 12000, 12001, 16382, 16383])
        wanted_mean, wanted = oracle(m.prior, inputs, v, beta, layout, rows)
        top = torch.stack([v[:, : row + 1].amax(1) for row in rows.tolist()], 1).double()
        within_sight = beta.double() * (top - wanted) <= 60
        error = (free[:, rows] - wanted).abs() / wanted.abs().clamp(min=1)
        assert within_sight.float().mean() > 0.6
        assert error[within_sight].max() <= 1e-5
        assert ((mean[:, rows] - wanted_mean).abs() <= 1e-5 * v.abs().amax(1, keepdim=True)).all()
        assert (free[:, rows] <= top + 1e-6 * top.abs().clamp(min=1)).all()
        assert (free >= mean - 1e-6 * mean.abs()).all()


class TestCache:
    @staticmethod
    def entries_per_token(state) -> float:
        cache = state.prior
        tensors = [cache.keys.tensor, cache.stream.data.tensor]
        return sum(t.numel() for t in tensors) / (state.batch * cache.keys.length)

    @pytest.mark.parametrize("kv_heads", [1, 3])
    @pytest.mark.parametrize(("cache", "copies"), [("value", 1), ("exp", 2)])
    def test_the_cache_keeps_keys_and_each_value_once_unless_asked(self, kv_heads: int, cache: str, copies: int):
        m = FreeEnergyMixer(48, 3, kv_heads=kv_heads, prior_options={"cache": cache})
        x = tokens(dim=48, dtype=torch.float32)
        with torch.no_grad():
            _, state = m(x[:, :9], return_state=True)
            for t in range(9, 20):
                _, state = m(x[:, t : t + 1], state=state, return_state=True)
        assert self.entries_per_token(state) == kv_heads * (m.widths.key + copies * m.widths.value)

    def test_the_cache_of_the_default_mixer_is_three_quarters_of_attention(self):
        x = tokens(dim=48, dtype=torch.float32)
        mixers = [FreeEnergyMixer(48, 3, parts=parts) for parts in ("CLTG", "")]
        sizes = [self.entries_per_token(m(x, return_state=True)[1]) for m in mixers]
        assert sizes[0] == 0.75 * sizes[1]

    def test_growth_is_amortised(self):
        m, x = FreeEnergyMixer(8, 2), tokens(batch=1, length=2 * SPARE + 9, dim=8, dtype=torch.float32)
        buffers = set()
        with torch.no_grad():
            state = None
            for part in x.split(1, 1):
                _, state = m(part, state=state, return_state=True)
                buffers.add(state.prior.keys.tensor.untyped_storage().data_ptr())
                buffers.add(state.prior.stream.data.tensor.untyped_storage().data_ptr())
        assert len(buffers) <= 2 * 5
        room = state.prior.keys.tensor.untyped_storage().nbytes() / state.prior.keys.tensor.nbytes
        assert room <= 2.5

    @pytest.mark.parametrize("kind", ["plain", "mask", "a row that ended"])
    @pytest.mark.parametrize("size", [1, 3, 29])
    @pytest.mark.parametrize("cache", ["value", "exp"])
    def test_a_windowed_stream_stays_bounded_and_right(self, kind: str, size: int, cache: str):
        window, length = 7, {1: 200, 3: 400, 29: 3000}[size]
        m = stir(FreeEnergyMixer(8, 2, window=window, prior_options={"cache": cache}))
        x = tokens(batch=2, length=length, dim=8, dtype=torch.float32)
        keep = noise(2, length) > -0.8
        if kind == "a row that ended":
            keep[1, 40:] = False
        given = {} if kind == "plain" else {"mask": keep}
        longest, outputs, state = 0, [], None
        with torch.no_grad():
            for start in range(0, length, size):
                here = slice(start, start + size)
                part = {name: value[:, here] for name, value in given.items()}
                y, state = m(x[:, here], state=state, return_state=True, **part)
                outputs.append(y)
                longest = max(longest, state.prior.keys.length)
            wanted = m(x, **given)
        assert_close({"y": torch.cat(outputs, 1)}, {"y": wanted}, 2e-5)
        assert longest <= 8 * window + 2 * size + 100

    @pytest.mark.parametrize("cache", ["value", "exp"])
    @pytest.mark.parametrize("jump", [1e2, 1e4, -1e4])
    def test_a_stream_survives_a_value_far_away(self, cache: str, jump: float):
        m = stir(FreeEnergyMixer(24, 3, parts="LT", prior_options={"cache": cache}))
        values = m.kv_heads * m.widths.value
        with torch.no_grad():
            # Input channel 0 moves the values only.
            m.prior_proj.linear.weight[:, 0] = 0
            m.value_proj.linear.weight[:, 0] = 0
            m.value_proj.linear.weight[: values - 3, 0] = 1
        exact = FreeEnergyMixer(24, 3, parts="LT", dtype=torch.float64)
        exact.load_state_dict(m.state_dict())
        x = tokens(length=40, dtype=torch.float32)
        x[:, 17, 0] = jump
        x[:, 29, 0] = -2 * jump
        with torch.no_grad():
            stream, wanted = streamed(m, x, [9] + [1] * 31), exact(x.double())
        error = (stream - wanted).abs().amax((0, 2)) / wanted.abs().amax((0, 2)).clamp(min=1)
        assert error.max() <= 1e-5

    @pytest.mark.parametrize("cache", ["value", "exp"])
    @pytest.mark.parametrize("size", [1.0, 100.0])
    def test_steps_at_small_temperatures_are_exact(self, cache: str, size: float):
        m = stir(FreeEnergyMixer(24, 3, parts="L", prior_options={"cache": cache}))
        x = 0.5 * tokens(length=150, dtype=torch.float32)
        beta = torch.full((3, m.widths.value), 0.02)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(x)
            v = size * v
            reads, state = [], None
            for here in (slice(t, t + 1) for t in range(150)):
                step = {name: value[:, here] for name, value in inputs.items()}
                at = layout._replace(position=layout.position[:, here])
                _, free, state = m.prior.read(step, v[:, here], beta, at, state, True)
                reads.append(free)
        _, wanted = oracle(m.prior, inputs, v, beta, layout)
        error = (torch.cat(reads, 1) - wanted).abs() / wanted.abs().clamp(min=1)
        assert error.max() <= 1e-5


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}, {"kv_heads": 1}], ids=str)
def test_the_path_of_other_devices_gives_the_same(monkeypatch, options):
    """Away from the CPU kernel the read calls scaled_dot_product_attention and has a backward of its own."""
    torch.manual_seed(0)
    m = FreeEnergyMixer(24, 3, dtype=torch.float64, **options)
    x = torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 3:5] = False

    def results() -> list[torch.Tensor]:
        y = m(x, mask=mask) if options else m(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])]

    wanted = results()
    monkeypatch.setattr(attend, "has_own_kernel", lambda q: False)
    for got, want in zip(results(), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
