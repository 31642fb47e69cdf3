"""The softmax prior: rotary positions, equality with standard attention, windows, biases, the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, oracle, stir, streamed, tokens
from torch import Tensor, nn

from femixer import FreeEnergyMixer, use_backend
from femixer.layout import Past
from femixer.priors import Alibi
from femixer.rotary import Rotation, rotated
from femixer.state import SPARE


class TestRotary:
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
        q, k = (m.prior_proj(x)[name] for name in "qk")
        v = m.value_proj(x)["v"].unflatten(-1, (-1, 8))
        if rope:
            q, k = (t.flatten(2) for t in rotated(q, k, Rotation(torch.arange(37)[None], 8, 10000.0), torch.float32))
        q, k = (t.unflatten(-1, (-1, 8)) for t in (q, k))
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
    @pytest.mark.parametrize("window", [None, 15])
    @pytest.mark.parametrize("backend", ["auto", "plain"])
    def test_a_stream_survives_a_value_far_away(self, cache: str, jump: float, window: int | None, backend: str):
        m = stir(FreeEnergyMixer(24, 3, parts="LT", window=window, prior_options={"cache": cache}))
        values = m.kv_heads * m.widths.value
        with torch.no_grad():
            # Input channel 0 moves the values only.
            m.prior_proj.linear.weight[:, 0] = 0
            m.value_proj.linear.weight[:, 0] = 0
            m.value_proj.linear.weight[: values - 3, 0] = 1
        exact = FreeEnergyMixer(24, 3, parts="LT", window=window, dtype=torch.float64)
        exact.load_state_dict(m.state_dict())
        x = tokens(length=40, dtype=torch.float32)
        x[:, 17, 0] = jump
        x[:, 29, 0] = -2 * jump
        with torch.no_grad(), use_backend(backend):
            stream, wanted = streamed(m, x, [9] + [1] * 31), exact(x.double())
        error = (stream - wanted).abs().amax((0, 2)) / wanted.abs().amax((0, 2)).clamp(min=1)
        assert error.max() <= 1e-5

    @pytest.mark.parametrize("size", [1e5, 1e8, 1e18])
    @pytest.mark.parametrize("backend", ["auto", "plain"])
    def test_beyond_the_range_that_is_exact_a_stream_is_still_the_full_read(self, size: float, backend: str):
        m = stir(FreeEnergyMixer(24, 3, parts="CLTG"))
        x = size * tokens(length=29, dtype=torch.float32)
        with torch.no_grad(), use_backend(backend):
            stream, whole = streamed(m, x, [9] + [1] * 20), m(x)
        assert whole.isfinite().all()
        error = (stream - whole).abs().amax((0, 2)) / whole.abs().amax((0, 2)).clamp(min=1)
        assert error.max() <= 1e-4

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
