"""Properties that every prior shares, over all registered priors and their variants (see matrix.py)."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from matrix import (
    BATCH,
    DIM,
    HEADS,
    LENGTH,
    MASK,
    SEGMENTS,
    Variant,
    assert_close,
    outcome,
    plain_gate,
    plain_mixer,
    reads_of,
    separately,
    streamed,
    tokens,
    variants,
)
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS
from femixer.priors.directed import DirectedPrior

EXACT = 1e-10  # float64, different order of summation
ROUNDING = 2e-5  # float32, relative to the largest output
CHUNKS = {"chunks": [1, 4, 9, 1, 8], "halves": [12, 11], "tokens": [1] * LENGTH}


def assert_streams(m: FreeEnergyMixer, x: Tensor, wanted: dict[str, Tensor], **layout: Tensor) -> None:
    """In chunks of every kind, with gradients and without."""
    for sizes in CHUNKS.values():
        assert_close(outcome(m, lambda x: streamed(m, x, sizes, **layout), x), wanted, EXACT)  # noqa: B023
        with torch.no_grad():
            assert_close({"y": streamed(m, x, sizes, **layout)}, {"y": wanted["y"]}, EXACT)


class TestStreaming:
    @variants()
    @pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
    def test_full_is_chunked_is_token_by_token(self, variant: Variant, sizes: list[int]):
        m, x = variant.build(), tokens()
        assert_close(outcome(m, lambda x: streamed(m, x, sizes), x), outcome(m, m, x), EXACT)

    @variants()
    @pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_the_growing_cache_gives_the_same(self, variant: Variant, sizes: list[int], mode):
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        with mode():
            assert_close({"y": streamed(m, x, sizes)}, {"y": m(x)}, ROUNDING)

    @variants()
    @pytest.mark.parametrize(
        ("mode", "prefix"),
        [
            (torch.enable_grad, [7]),
            (torch.no_grad, [7]),
            (torch.no_grad, [3, 1, 1, 2]),
            (torch.inference_mode, [3, 1, 1, 2]),
        ],
    )
    def test_two_continuations_of_one_state_are_both_right(self, variant: Variant, mode, prefix: list[int]):
        """A state is a value, also where the caches of several states share one growing buffer, as they do without
        gradients after steps."""
        m, x, other = variant.build(), tokens(), tokens(seed=2)
        other[:, :7] = x[:, :7]
        with mode():
            wanted, wanted_other = m(x), m(other)
            state = None
            for part in x[:, :7].split(prefix, 1):
                _, state = m(part, state=state, return_state=True)
            first, state_one = m(x[:, 7:8], state=state, return_state=True)
            second, state_two = m(other[:, 7:8], state=state, return_state=True)
            results = [first], [second]
            for t in range(8, LENGTH):
                y, state_one = m(x[:, t : t + 1], state=state_one, return_state=True)
                results[0].append(y)
                y, state_two = m(other[:, t : t + 1], state=state_two, return_state=True)
                results[1].append(y)
            again, _ = m(x[:, 7:], state=state, return_state=True)
        assert_close({"y": torch.cat(results[0], 1)}, {"y": wanted[:, 7:]}, EXACT)
        assert_close({"y": torch.cat(results[1], 1)}, {"y": wanted_other[:, 7:]}, EXACT)
        assert_close({"y": again}, {"y": wanted[:, 7:]}, EXACT)

    @variants("CLTG", "mean", "expcache", "window", "groupedwindow")
    def test_a_stream_may_change_between_gradients_and_none(self, variant: Variant):
        m, x = variant.build(), tokens()
        grad, none, inference = torch.enable_grad, torch.no_grad, torch.inference_mode
        modes = [grad, none, inference, inference, none, grad, inference, inference, none, grad, none, inference]
        state, outputs = None, []
        for part, mode in zip(x.split(2, 1), modes, strict=True):
            with mode():
                y, state = m(part, state=state, return_state=True)
            outputs.append(y)
        assert_close({"y": torch.cat(outputs, 1).detach()}, {"y": m(x).detach()}, EXACT)

    @variants("CLTG", "mean", "expcache", "window")
    def test_what_was_made_for_inference_can_be_gone_on_from_with_gradients(self, variant: Variant):
        m, x = variant.build(), tokens()
        with torch.inference_mode():
            _, state = m(x[:, :5], return_state=True)
            _, state = m(x[:, 5:6], state=state, return_state=True)
        rest = outcome(m, lambda x: m(x[:, 6:], state=state, return_state=True)[0], x)
        assert_close({"y": rest["y"]}, {"y": m(x)[:, 6:].detach()}, EXACT)

    @variants()
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_an_empty_chunk_changes_nothing(self, variant: Variant, mode):
        m, x = variant.build(), tokens()
        with mode():
            assert_close({"y": streamed(m, x, [0, 5, 0, 0, 17, 1, 0])}, {"y": m(x)}, EXACT)

    @variants()
    def test_a_state_is_not_changed_by_going_on_from_it(self, variant: Variant):
        m, x = variant.build(), tokens()
        with torch.no_grad():
            _, state = m(x[:, :9], return_state=True)
            first, _ = m(x[:, 9:], state=state, return_state=True)
            m(x[:, 9:] * 100, state=state, return_state=True)
            second, _ = m(x[:, 9:], state=state, return_state=True)
        assert torch.equal(first, second)

    @variants()
    def test_rows_of_a_state_go_on_as_their_own_batch(self, variant: Variant):
        """What beam search does: sequences are dropped and repeated in mid-stream, padded or not."""
        m, x, index = variant.build(), tokens(batch=len(MASK)), torch.tensor([2, 0, 2, 2])
        for mask in (None, MASK):
            with torch.no_grad():
                before = None if mask is None else mask[:, :9]
                _, state = m(x[:, :9], mask=before, return_state=True)
                after = None if mask is None else mask[index, 9:]
                continued, _ = m(x[index, 9:], mask=after, state=state.rows(index), return_state=True)
                whole = m(x[index], mask=None if mask is None else mask[index])
            assert_close({"y": continued}, {"y": whole[:, 9:]}, EXACT)


class TestPadding:
    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("offset", [-300.0, 300.0])
    def test_values_far_from_zero_give_padding_no_say_in_gradients(self, variant: Variant, causal: bool, offset: float):
        """A padding row reads 0, which then lies far above or below every value."""
        m, x = variant.build(causal=causal), tokens(batch=len(MASK))
        with torch.no_grad():
            m.value_proj.linear.bias[: m.kv_heads * m.widths.value] += offset
        padded = outcome(m, lambda x: m(x, mask=MASK), x)
        assert all(torch.isfinite(value).all() for value in padded.values())
        assert_close(padded, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), 1e-8)

    @variants()
    def test_padded_is_unpadded(self, variant: Variant):
        m, x = variant.build(), tokens(batch=len(MASK))
        padded = outcome(m, lambda x: m(x, mask=MASK), x)
        assert_close(padded, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), EXACT)
        assert padded["y"][~MASK].count_nonzero() == 0
        assert padded["d x"][~MASK].count_nonzero() == 0

    @variants()
    def test_a_padded_stream_is_unpadded(self, variant: Variant):
        m, x = variant.build(), tokens(batch=len(MASK))
        assert_streams(m, x, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), mask=MASK)

    @variants()
    def test_a_mask_may_come_and_go_in_a_stream(self, variant: Variant):
        m, x = variant.build(), tokens(batch=len(MASK))
        keep = MASK.clone()
        keep[:, :6] = keep[:, 16:] = True
        with torch.no_grad():
            first, state = m(x[:, :6], return_state=True)
            second, state = m(x[:, 6:16], mask=keep[:, 6:16], state=state, return_state=True)
            third, _ = m(x[:, 16:], state=state, return_state=True)
            wanted = separately(m, x, keep.long() - 1)
        assert_close({"y": torch.cat([first, second, third], 1)}, {"y": wanted}, EXACT)

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("content", [1e4, torch.inf, torch.nan])
    def test_content_of_padding_is_irrelevant(self, variant: Variant, content: float, causal: bool):
        m, x = variant.build(causal=causal), tokens(batch=len(MASK))
        changed = torch.where(MASK[..., None], x, x * content)
        before, after = (outcome(m, lambda x: m(x, mask=MASK), each) for each in (x, changed))
        assert all(torch.equal(before[name], after[name]) for name in before)
        ids = MASK.long() * 3 - 1
        before, after = (outcome(m, lambda x: m(x, segments=ids), each) for each in (x, changed))
        assert all(torch.equal(before[name], after[name]) for name in before)

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_everything_padding_gives_zero(self, variant: Variant, causal: bool):
        m, x = variant.build(causal=causal), tokens()
        nothing = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        result = outcome(m, lambda x: m(x, mask=nothing), x)
        assert result["y"].count_nonzero() == 0
        assert result["d x"].count_nonzero() == 0
        assert all(value.isfinite().all() for value in result.values())

    @variants()
    def test_a_stream_that_begins_with_only_padding_begins_later(self, variant: Variant):
        m, x = variant.build(), tokens()
        nothing = torch.zeros(BATCH, 9, dtype=torch.bool)
        with torch.no_grad():
            y, state = m(x[:, :9], mask=nothing, return_state=True)
            later, _ = m(x[:, 9:], state=state, return_state=True)
            assert_close({"y": later}, {"y": m(x[:, 9:])}, EXACT)
        assert y.count_nonzero() == 0


class TestSegments:
    @variants()
    def test_packed_is_separate(self, variant: Variant):
        m, x = variant.build(), tokens()
        packed = outcome(m, lambda x: m(x, segments=SEGMENTS), x)
        assert_close(packed, outcome(m, lambda x: separately(m, x, SEGMENTS), x), EXACT)
        assert packed["y"][SEGMENTS < 0].count_nonzero() == 0

    @variants()
    def test_segments_may_be_split_over_chunks(self, variant: Variant):
        m, x = variant.build(), tokens()
        assert_streams(m, x, outcome(m, lambda x: separately(m, x, SEGMENTS), x), segments=SEGMENTS)

    @variants("CLTG")
    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
    def test_segments_of_any_integer_type(self, variant: Variant, dtype: torch.dtype):
        m, x = variant.build(), tokens()
        assert torch.equal(m(x, segments=SEGMENTS.to(dtype)), m(x, segments=SEGMENTS))

    @variants()
    def test_no_gradient_crosses_a_segment(self, variant: Variant):
        m, x = variant.build(), tokens().requires_grad_()
        (gradient,) = torch.autograd.grad(m(x, segments=SEGMENTS)[1, 6:11].sum(), x)
        assert gradient[1, 6:11].abs().amin(-1).min() > 0
        gradient[1, 6:11] = 0
        assert gradient.count_nonzero() == 0


class TestCausality:
    @variants()
    @pytest.mark.parametrize("factor", [1e2, 1e4])
    @pytest.mark.parametrize("start", [11, LENGTH - 1])
    def test_a_larger_future_leaves_the_past_alone(self, variant: Variant, factor: float, start: int):
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        changed = x.clone()
        changed[:, start:] *= factor
        assert_close({"y": m(changed)[:, :start]}, {"y": m(x)[:, :start]}, ROUNDING)

    @variants()
    def test_the_past_has_no_gradient_in_the_future(self, variant: Variant):
        m, x = variant.build(), tokens()
        x[:, 12:] *= 1e3
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(m(x)[:, :12].sum(), x)
        assert gradient[:, 12:].count_nonzero() == 0
        assert gradient[:, :12].abs().amin(-1).min() > 0


class TestEncoder:
    @variants()
    def test_every_token_sees_every_other(self, variant: Variant):
        m, x = variant.build(causal=False), tokens(batch=1, length=4).requires_grad_()
        for t in range(4):
            (gradient,) = torch.autograd.grad(m(x)[:, t].sum(), x)
            assert gradient.abs().amin(-1).min() > 0

    @variants()
    def test_padded_and_packed_is_separate(self, variant: Variant):
        m, x = variant.build(causal=False), tokens(batch=len(MASK))
        wanted = outcome(m, lambda x: separately(m, x, MASK.long() - 1), x)
        assert_close(outcome(m, lambda x: m(x, mask=MASK), x), wanted, EXACT)
        wanted = outcome(m, lambda x: separately(m, x, SEGMENTS), x[:BATCH])
        assert_close(outcome(m, lambda x: m(x, segments=SEGMENTS), x[:BATCH]), wanted, EXACT)

    @variants()
    def test_reversed_time_mirrors(self, variant: Variant):
        """Holds without RoPE: a rotation by the distance t - i has a sign, and so has a time axis."""
        rope = {"rope": False} if PRIORS[variant.prior].queries_and_keys else {}
        m, x = variant.build(causal=False, **rope), tokens()
        assert_close(outcome(m, lambda x: m(x.flip(1)).flip(1), x), outcome(m, m, x), EXACT)
        ids = SEGMENTS.flip(1)
        mirrored = outcome(m, lambda x: m(x.flip(1), segments=ids).flip(1), x)
        assert_close(mirrored, outcome(m, lambda x: m(x, segments=SEGMENTS), x), EXACT)

    @pytest.mark.parametrize("options", [{"parts": ""}, {"parts": "L"}, {"parts": "LTG", "kv_heads": 1}], ids=str)
    def test_softmax_without_rope_and_conditioner_does_not_see_order(self, options: dict):
        m, x = Variant("softmax", "", options).build(causal=False, rope=False), tokens()
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
        back = order.argsort()
        assert_close(outcome(m, lambda x: m(x[:, order])[:, back], x), outcome(m, m, x), EXACT)


class TestDefinition:
    """The fast path is the definition: dense weights in float64, plain sums, plain logarithm, plain gates."""

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("kind", ["plain", "mask", "segments"])
    def test_the_mixer_is_its_formula(self, variant: Variant, causal: bool, kind: str):
        m, x = variant.build(causal=causal), tokens()
        layout = {"plain": {}, "mask": {"mask": MASK[:BATCH]}, "segments": {"segments": SEGMENTS}}[kind]
        wanted = plain_mixer(m, x, **layout)
        assert_close({"y": m(x, **layout)}, {"y": wanted}, EXACT)

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_weights_are_a_distribution_over_what_is_visible(self, variant: Variant, causal: bool):
        m, x = variant.build(causal=causal), tokens()
        projected, layout = m.prepare(x, segments=SEGMENTS)
        p = m.prior.over_tokens(m.prior.weights(projected.inputs, layout))
        visible = (layout.segment[:, :, None] == layout.segment[:, None]) & (layout.segment >= 0)[:, :, None]
        if causal:
            visible = visible.tril()
        if p.dim() == 5:  # per channel
            visible = visible[..., None]
        assert p.masked_fill(visible[:, None], 0).count_nonzero() == 0
        assert (p >= 0).all()
        if getattr(m.prior, "normalize", True):
            total = p.sum(3)
            assert total[(layout.segment >= 0)[:, None].expand(total.shape[:3])].sub(1).abs().max() < 1e-12

    @variants()
    def test_rows_of_weights_are_the_rows_of_all_weights(self, variant: Variant):
        m, x = variant.build(), tokens()
        (inputs, *_), layout = m.prepare(x, segments=SEGMENTS)
        rows = torch.tensor([0, 8, 3, LENGTH - 1])
        some, every = m.prior.weights(inputs, layout, rows), m.prior.weights(inputs, layout)
        assert_close({"p": some}, {"p": every[:, :, rows]}, EXACT)

    @variants("CLTG", "mean", "grouped", "window")
    def test_gradcheck(self, variant: Variant):
        self.gradcheck(variant.build(dim=4, heads=2))

    @variants("CLTG")
    def test_gradcheck_in_encoder_mode(self, variant: Variant):
        self.gradcheck(variant.build(dim=4, heads=2, causal=False))

    @staticmethod
    def gradcheck(m: FreeEnergyMixer) -> None:
        names, parameters = zip(*m.named_parameters(), strict=True)
        ids = torch.tensor([[1, 1, -1, 1, 2]])

        def run(x: Tensor, *values: Tensor) -> Tensor:
            return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (x,), {"segments": ids})

        x = tokens(batch=1, length=5, dim=4).requires_grad_()
        assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def value_patterns(kind: str, length: int, beta: Tensor) -> dict[str, Tensor]:
    """Values [length, G] by name for temperatures beta [G, patterns]; `wild` ones have |beta v| up to 1e4."""
    groups = beta.shape[0]
    noise = torch.randn(length, groups, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    ramp = torch.linspace(-1, 1, length, dtype=torch.float64)[:, None].expand(-1, groups)
    signs = 1 - 2 * (torch.arange(length, dtype=torch.float64) % 2)[:, None].expand(-1, groups)
    ones = torch.ones_like(ramp)
    if kind == "tame":
        return {
            "noise": noise,
            "small noise": 1e-3 * noise,
            "large noise": 10 * noise,
            "ramp": 5 * ramp,
            "signs": signs,
            "offset": noise + 100,
            "constant": 3.7 * ones,
        }
    giant = (torch.arange(length) == length * 3 // 4)[:, None]
    size = 1e4 / beta.double()
    return {
        "noise": size[:, 0] * noise / noise.abs().max(),
        "rising": size[:, 1] * ramp,
        "falling": -size[:, 2] * ramp,
        "one giant": torch.where(giant, size[:, 3] * ones, noise),
        "signs": size[:, 4] * signs,
        "offset": size[:, 5] * (1 + 1e-4 * noise),
        "constant": size[:, 6] * ones,
    }


READS = ("L", "channelL", "grouped", "window", "alibi", "norope")


class TestExactness:
    """Float32 against the float64 oracle. Tame values stay on the fast path, wild ones do not."""

    WIDTH = 7  # value channels per head: one per pattern
    ROWS = 71  # of the gradient test: more than a chunk or a block

    def setup_read(self, variant: Variant, kind: str, causal: bool, length: int):
        m = variant.build(
            dim=48, heads=HEADS, dtype=torch.float32, causal=causal, parts="L", value_dim=HEADS * self.WIDTH
        )
        # Half the usual size: scores up to about 8. Larger ones carry float32's rounding of q k into p.
        x = 0.5 * tokens(batch=1, length=length, dim=48, dtype=torch.float32)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(x)
        groups = v.shape[2]
        order = torch.randperm(groups * self.WIDTH, generator=torch.Generator().manual_seed(13))
        beta = torch.logspace(-1.69, 1, groups * self.WIDTH)[order].view(groups, self.WIDTH)
        if m.prior.one_temperature:
            beta = beta[:, :1].expand(-1, self.WIDTH)
        patterns = value_patterns(kind, length, beta)
        v = torch.stack(list(patterns.values()), -1)[None].float()
        return m, inputs, v, beta, layout, list(patterns)

    @staticmethod
    def visible_extent(m: FreeEnergyMixer, p: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Largest value over the support, [B, rows, H, D]; a decayed weight may be too small for float64."""
        v = v.repeat_interleave(p.shape[1] // v.shape[2], 2).transpose(1, 2)[:, :, None]
        if m.prior.one_temperature:  # all channels of the head compete
            v = v.amax(-1, keepdim=True).expand(*v.shape)
        support = p > 0 if p.dim() == 5 else (p > 0)[..., None]
        if isinstance(m.prior, DirectedPrior):
            support = (torch.arange(p.shape[3]) <= rows[:, None])[..., None] if m.causal else torch.ones_like(support)
        return torch.where(support, v, -torch.inf).amax(-2).transpose(1, 2)

    @variants(*READS)
    @pytest.mark.parametrize("kind", ["tame", "wild"])
    @pytest.mark.parametrize(("causal", "length"), [(True, 1025), (True, 101), (False, 400)])
    def test_mean_and_free_energy_are_exact(self, variant: Variant, kind: str, causal: bool, length: int):
        self.check_reads(variant, kind, causal, length)

    @variants("L", "window")
    def test_mean_and_free_energy_are_exact_at_4096_tokens(self, variant: Variant):
        self.check_reads(variant, "wild", True, 4096)

    def check_reads(self, variant: Variant, kind: str, causal: bool, length: int) -> None:
        m, inputs, v, beta, layout, _ = self.setup_read(variant, kind, causal, length)
        mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
        rows = torch.tensor(
            sorted({0, 1, 2, length // 3, length * 3 // 4 - 1, length * 3 // 4, length - 2, length - 1})
        )
        weights = m.prior.weights(inputs, layout, rows)
        wanted_mean, wanted = reads_of(weights, m.prior.over_index(v.double()), beta.double())
        top = self.visible_extent(m, m.prior.over_tokens(weights), v.double(), rows)
        repeats = HEADS // beta.shape[0]
        temperature = beta.double().repeat_interleave(repeats, 0)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        mean, free = mean[:, rows].double(), free[:, rows].double()
        rounding = 1e-6 * torch.maximum(top.abs(), wanted.abs()).clamp(min=1)
        assert (mean <= free + rounding).all()
        assert (free <= top + rounding).all()
        size = v.double().abs().amax(1).repeat_interleave(repeats, 1)[:, None]
        if m.prior.one_temperature:
            size = size.amax(-1, keepdim=True)
        assert ((mean - wanted_mean).abs() <= 1e-5 * size).all()
        within_sight = (temperature >= 0.02) & (temperature * (top - wanted) <= 60)
        assert within_sight.float().mean() > 0.5
        error = (free - wanted).abs() / wanted.abs().clamp(min=1)
        assert error[within_sight].max() <= 1e-5

    def gradients(
        self, variant: Variant, kind: str, causal: bool
    ) -> Iterator[tuple[str, Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]]:
        """For each pattern: its name, largest |v| [G], beta [G], and (gradient, oracle's gradient) by name."""
        m, inputs, v, beta, layout, patterns = self.setup_read(variant, kind, causal, self.ROWS)
        names = [*inputs, "v", "beta"]
        leaves = [leaf.requires_grad_() for leaf in (*inputs.values(), v, beta)]
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wide_inputs = dict(zip(inputs, wide, strict=False))
        weights = m.prior.weights(wide_inputs, layout)
        wanted_mean, wanted = reads_of(weights, m.prior.over_index(wide[-2]), wide[-1])
        mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
        with torch.no_grad():
            top = self.visible_extent(m, m.prior.over_tokens(weights), wide[-2], torch.arange(self.ROWS))
        temperature = wide[-1].repeat_interleave(HEADS // beta.shape[0], 0)
        within_sight = (temperature * (top - wanted) <= 60).double()
        for channel, pattern in enumerate(patterns):
            cotangent = torch.randn(free.shape, generator=torch.Generator().manual_seed(channel), dtype=torch.float64)
            cotangent = cotangent * within_sight
            cotangent[..., :channel] = cotangent[..., channel + 1 :] = 0
            actual = torch.autograd.grad(((free + mean) * cotangent.float()).sum(), leaves, retain_graph=True)
            expected = torch.autograd.grad(((wanted + wanted_mean) * cotangent).sum(), wide, retain_graph=True)
            if m.prior.one_temperature:  # only all channels' together are one temperature's gradient
                actual, expected = ((*grads[:-1], grads[-1].sum(-1)) for grads in (actual, expected))
            size = v.detach()[0, ..., channel].abs().amax(0)
            if m.prior.one_temperature:
                size = v.detach()[0].abs().amax((0, 2))
            yield (
                pattern,
                size,
                beta.detach()[:, channel],
                dict(zip(names, zip(actual, expected, strict=True), strict=True)),
            )

    @variants(*READS)
    @pytest.mark.parametrize(("kind", "causal"), [("tame", True), ("wild", True), ("wild", False)])
    def test_gradients_are_exact(self, variant: Variant, kind: str, causal: bool):
        """Relative to the gradient, and to the terms of order v / beta whose difference it is."""
        eps = torch.finfo(torch.float32).eps
        for pattern, size, beta, gradients in self.gradients(variant, kind, causal):
            tolerance = max(1e-4, 8 * eps * (beta * size).max().item())
            for name, (actual, expected) in gradients.items():
                error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
                terms = {"v": 1.0, "beta": self.ROWS * (size / beta).max().item()}.get(name, size.max().item())
                allowed = tolerance * scale + 8 * eps * max(1.0, terms)
                assert error <= allowed, f"d {name}, {pattern}: {error:.1e} of {scale:.1e}, allowed {allowed:.1e}"


class TestLowPrecision:
    @staticmethod
    def errors(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> dict[str, float]:
        """Root mean square by name; infinite for a NaN, which plain float16 has in its gradients."""
        result = {}
        for name in expected[0]:
            differences = torch.stack([a[name].double() - e[name] for a, e in zip(actual, expected, strict=True)])
            error = differences.square().mean().sqrt().item()
            result[name] = math.inf if math.isnan(error) else error
        return result

    @variants("CLTG", "mean", "grouped", "window", "alibi")
    @pytest.mark.parametrize(
        ("dtype", "causal"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
    )
    def test_autocast_is_as_good_as_plain_torch_under_it(self, variant: Variant, dtype: torch.dtype, causal: bool):
        exact = variant.build(causal=causal)
        m = copy.deepcopy(exact).float()

        def low(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype):
                    return forward(x).float()

            return run

        inputs = [tokens(seed=seed) for seed in range(5)]
        wanted = [outcome(exact, exact, x) for x in inputs]
        ours = [outcome(m, low(m), x.float()) for x in inputs]
        plain = [outcome(m, low(lambda x: plain_mixer(m, x, torch.float32)), x.float()) for x in inputs]
        assert all(value.isfinite().all() for result in ours for value in result.values())
        errors, allowed = self.errors(ours, wanted), self.errors(plain, wanted)
        assert errors["y"] <= 2 * allowed["y"]
        for name, error in errors.items():
            assert error <= 3 * allowed[name], f"{name}: {error:.2e}, plain torch {allowed[name]:.2e}"

    @variants("CLTG", "mean", "expcache", "grouped", "window")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_read_does_not_see_autocast(self, variant: Variant, dtype: torch.dtype):
        """Projections may be half precision; exponentials, sums, normalizers and caches are float32."""
        m = variant.build(dtype=torch.float32)
        x = tokens(dtype=torch.float32)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(x)
            wanted = m.prior.read(inputs, v, m._beta(), layout, None, False)[:2]
            with torch.autocast("cpu", dtype):
                full = m.prior.read(inputs, v, m._beta(), layout, None, False)[:2]
                state, steps = None, []
                for t in range(LENGTH):
                    here = slice(t, t + 1)
                    step_layout = layout._replace(position=layout.position[:, here])
                    step = {name: value[:, here] for name, value in inputs.items()}
                    mean, free, state = m.prior.read(step, v[:, here], m._beta(), step_layout, state, True)
                    steps.append((mean, free))
        for i, name in enumerate(("mean", "free energy")):
            if wanted[i] is not None:
                assert_close({name: full[i]}, {name: wanted[i]}, ROUNDING)
                assert_close({name: torch.cat([step[i] for step in steps], 1)}, {name: wanted[i]}, ROUNDING)

    @variants("CLTG")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_half_precision_module_runs(self, variant: Variant, dtype: torch.dtype):
        exact = variant.build()
        m = copy.deepcopy(exact).to(dtype)
        x = tokens()
        y = m(x.to(dtype))
        assert y.dtype == dtype
        assert_close({"y": y}, {"y": exact(x)}, 0.1 if dtype == torch.bfloat16 else 0.02)


# One prior of each kind of kernel.
KINDS = ("softmax", "gla", "aft", "mamba")


# torch about itself: its tracing and its imports.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
class TestCompile:
    @staticmethod
    def compare(m: FreeEnergyMixer, backend: str, tolerance: float, **layout: Tensor) -> None:
        torch._dynamo.reset()
        x = tokens(dtype=m.out_proj.weight.dtype)
        compiled = torch.compile(m, fullgraph=True, backend=backend)
        assert_close(outcome(m, lambda x: compiled(x, **layout), x), outcome(m, lambda x: m(x, **layout), x), tolerance)

    @variants("CLTG")
    def test_one_graph_equals_eager(self, variant: Variant):
        self.compare(variant.build(), "aot_eager", EXACT, segments=SEGMENTS)

    @variants("CLTG", priors=KINDS)
    def test_one_graph_equals_eager_without_segments(self, variant: Variant):
        self.compare(variant.build(), "aot_eager", EXACT)

    @variants("mean")
    def test_one_graph_equals_eager_in_encoder_mode(self, variant: Variant):
        self.compare(variant.build(causal=False), "aot_eager", EXACT)

    @variants("alibi")
    def test_one_graph_equals_eager_under_a_mask(self, variant: Variant):
        self.compare(variant.build(causal=False), "aot_eager", EXACT, mask=MASK[:BATCH])

    @variants("L", priors=KINDS)
    def test_one_graph_serves_any_length(self, variant: Variant):
        torch._dynamo.reset()
        m = variant.build()
        compiled = torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch.no_grad():
            for length in (5, 11, LENGTH):
                x = tokens(length=length)
                assert_close({"y": compiled(x)}, {"y": m(x)}, EXACT)

    def test_inductor_equals_eager(self):
        m = Variant("softmax", "CLTG", {}).build(dtype=torch.float32)
        self.compare(m, "inductor", ROUNDING, segments=SEGMENTS)


class TestCopies:
    @variants()
    def test_state_dict_round_trip_bit_for_bit(self, variant: Variant):
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        file = io.BytesIO()
        torch.save(m.state_dict(), file)
        file.seek(0)
        other = FreeEnergyMixer(DIM, HEADS, variant.prior, **variant.options)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(x), m(x))

    @variants()
    def test_deepcopy_is_a_mixer_of_its_own(self, variant: Variant):
        m, x = variant.build(), tokens()
        before = m(x)
        other = copy.deepcopy(m)
        assert torch.equal(other(x), before)
        with torch.no_grad():
            other.out_proj.weight.mul_(2)
        assert torch.equal(m(x), before)

    @variants()
    def test_pickle(self, variant: Variant):
        m, x = variant.build(), tokens()
        assert torch.equal(pickle.loads(pickle.dumps(m))(x), m(x))

    @variants("CLTG")
    def test_a_state_of_the_original_is_refused_by_its_copy(self, variant: Variant):
        """Layers of a model are often made by deepcopy; a state of one is none of the other."""
        m, x = variant.build(), tokens()
        _, state = m(x, return_state=True)
        with pytest.raises(ValueError, match="state belongs to another mixer"):
            copy.deepcopy(m)(x, state=state, return_state=True)


class TestSmallSizes:
    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_no_sequences(self, variant: Variant, causal: bool):
        m, x = variant.build(causal=causal), tokens()[:0]
        assert m(x).shape == x.shape
        assert m(x, mask=torch.ones(x.shape[:2], dtype=torch.bool)).shape == x.shape
        m(x).sum().backward()

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("kind", ["plain", "mask", "segments"])
    def test_no_tokens(self, variant: Variant, causal: bool, kind: str):
        m, x = variant.build(causal=causal), tokens(length=0).requires_grad_()
        layout = {"plain": {}, "mask": {"mask": MASK[:BATCH, :0]}, "segments": {"segments": SEGMENTS[:, :0]}}[kind]
        y = m(x, **layout)
        assert y.shape == (BATCH, 0, DIM)
        y.sum().backward()
        assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in m.parameters())

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_one_token_reads_itself(self, variant: Variant, causal: bool):
        """With one visible token mean and free energy are its value, so L and T change nothing."""
        m, x = variant.build(causal=causal), tokens(length=1)
        if not getattr(m.prior, "normalize", True) or m.prior.one_temperature:
            return  # what it reads is not one value
        projected, _ = m.prepare(x)
        value = projected.v.repeat_interleave(m.heads // m.kv_heads, 2)
        if "G" in m.parts:
            value = value * plain_gate(projected.gate)
        assert_close({"y": m(x)}, {"y": m.out_proj(value.flatten(-2))}, EXACT)

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_batch_of_one_is_a_row_of_a_batch(self, variant: Variant, causal: bool):
        m, x = variant.build(causal=causal), tokens()
        assert_close({"y": torch.cat([m(row[None]) for row in x])}, {"y": m(x)}, EXACT)


class TestDropout:
    @variants("CLTG", "mean")
    def test_dropout_acts_in_training_on_the_output_of_the_read(self, variant: Variant):
        m, x = variant.build(dropout=0.25), tokens()
        seen: list[Tensor] = []
        m.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        m.eval()(x)
        torch.manual_seed(0)
        m.train()(x)
        read, dropped = seen
        kept = dropped != 0
        assert 0.7 < kept.double().mean() < 0.8
        assert_close({"read": dropped[kept]}, {"read": read[kept] / 0.75}, EXACT)

    @variants("CLTG")
    def test_dropout_does_nothing_in_evaluation(self, variant: Variant):
        m, x = variant.build(dropout=0.9).eval(), tokens()
        assert torch.equal(m(x), variant.build(dropout=0.0)(x))


def wrong(error: type[Exception], *words: str, **options: object):
    return pytest.param(options, error, words, id=" ".join(words))


class TestErrors:
    """Every bad argument has an error that names the argument, what came and what is allowed."""

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            wrong(ValueError, "prior='sofmax'", *PRIORS, prior="sofmax"),
            wrong(ValueError, "prior=['softmax']", *PRIORS, prior=["softmax"]),
            wrong(ValueError, "prior_options has rope=False", "own rope=", prior_options={"rope": False}),
            wrong(ValueError, "prior_options has window=5", "own window=", window=3, prior_options={"window": 5}),
            wrong(TypeError, "prior_options=3", "dict", prior_options=3),
            wrong(TypeError, "causal='yes'", "True or False", causal="yes"),
            wrong(TypeError, "value_dim=12.0", "integer", value_dim=12.0),
            wrong(ValueError, "dropout='a'", "at least 0", dropout="a"),
            wrong(ValueError, "window=True", "positive", window=True),
            wrong(ValueError, "budget='large'", "attention", "balanced", budget="large"),
            wrong(ValueError, "dim=25", "heads=3", "divisible", dim=25),
            wrong(ValueError, "dim=0", "positive", dim=0),
            wrong(ValueError, "dim=24.0", "integer", dim=24.0),
            wrong(ValueError, "heads=0", "positive", heads=0),
            wrong(ValueError, "heads=-3", "positive", heads=-3),
            wrong(ValueError, "heads=True", "integer", heads=True),
            wrong(ValueError, "kv_heads=2", "heads=3", kv_heads=2),
            wrong(ValueError, "kv_heads=0", "positive", kv_heads=0),
            wrong(ValueError, "value_dim=13", "multiple of heads=3", value_dim=13),
            wrong(ValueError, "value_dim=0", "positive", value_dim=0),
            wrong(ValueError, "value_dim=-3", "positive", value_dim=-3),
            wrong(ValueError, "value_dim=240", "dim=24", "at most", value_dim=240),
            wrong(ValueError, "parts='CLX'", "CLTG", parts="CLX"),
            wrong(ValueError, "parts='LL'", "CLTG", parts="LL"),
            wrong(ValueError, "parts='cl'", "CLTG", parts="cl"),
            wrong(ValueError, "parts='TG'", "needs L", parts="TG"),
            wrong(TypeError, "parts", "CLTG", "None", parts=None),
            wrong(ValueError, "dropout=1.0", "below 1", dropout=1.0),
            wrong(ValueError, "dropout=-0.1", "at least 0", dropout=-0.1),
            wrong(ValueError, "window=0", "positive", window=0),
            wrong(ValueError, "window=-5", "positive", window=-5),
            wrong(ValueError, "window=2.5", "number of tokens", window=2.5),
            wrong(ValueError, "decay='head'", "prior='softmax'", "score_bias", prior_options={"decay": "head"}),
            wrong(ValueError, "cache='none'", "value", "exp", prior_options={"cache": "none"}),
            wrong(ValueError, "rope_base=0.0", "positive", prior_options={"rope_base": 0.0}),
            wrong(TypeError, "score_bias", "callable", "3", prior_options={"score_bias": 3}),
        ],
    )
    def test_constructor(self, options: dict, error: type[Exception], words: tuple[str, ...]):
        with pytest.raises(error) as raised:
            FreeEnergyMixer(**{"dim": DIM, "heads": HEADS, **options})
        for word in words:
            assert word in str(raised.value), str(raised.value)

    @pytest.mark.parametrize("prior", PRIORS)
    def test_the_widest_value_dim_that_an_error_names_is_possible(self, prior: str):
        with pytest.raises(ValueError, match="at most") as raised:
            FreeEnergyMixer(DIM, HEADS, prior, value_dim=240)
        most = int(str(raised.value).split("at most ")[1].split()[0])
        m = FreeEnergyMixer(DIM, HEADS, prior, value_dim=most)
        assert m(torch.zeros(1, 2, DIM)).shape == (1, 2, DIM)
        with pytest.raises(ValueError, match="value_dim"):
            FreeEnergyMixer(DIM, HEADS, prior, value_dim=most + HEADS)

    @pytest.mark.parametrize("options", [{"rope": True}, {"window": 5}])
    def test_what_needs_queries_and_keys_does_not_fit_a_prior_without(self, options: dict):
        (name,) = options
        for prior in (prior for prior, kind in PRIORS.items() if not kind.queries_and_keys):
            with pytest.raises(ValueError, match=f"{name}=.* does not fit prior='{prior}'"):
                FreeEnergyMixer(DIM, HEADS, prior, **options)

    @pytest.mark.parametrize("prior", PRIORS)
    @pytest.mark.parametrize(
        ("inputs", "error", "words"),
        [
            wrong(ValueError, "x", "(3, 24)", "24]", x=torch.zeros(3, DIM)),
            wrong(ValueError, "x", "(3, 5, 23)", "24]", x=torch.zeros(3, 5, DIM - 1)),
            wrong(TypeError, "x", "int64", "float", x=torch.zeros(3, 5, DIM, dtype=torch.long)),
            wrong(TypeError, "x", "float64", "float32", x=torch.zeros(3, 5, DIM, dtype=torch.float64)),
            wrong(TypeError, "x", "list", "tensor", x=[[[0.0] * DIM]]),
            wrong(ValueError, "mask", "(3, 4)", "(3, 5)", mask=torch.ones(3, 4, dtype=torch.bool)),
            wrong(TypeError, "mask", "float32", "bool", mask=torch.ones(3, 5)),
            wrong(TypeError, "mask", "int64", "bool", mask=torch.ones(3, 5, dtype=torch.long)),
            wrong(TypeError, "mask", "list", "tensor", mask=[[True] * 5] * 3),
            wrong(ValueError, "mask", "meta", "cpu", mask=torch.ones(3, 5, dtype=torch.bool, device="meta")),
            wrong(ValueError, "segments", "(3, 5, 1)", "(3, 5)", segments=torch.zeros(3, 5, 1, dtype=torch.long)),
            wrong(TypeError, "segments", "float32", "integer", segments=torch.zeros(3, 5)),
            wrong(TypeError, "segments", "bool", "integer", segments=torch.ones(3, 5, dtype=torch.bool)),
            wrong(ValueError, "segments", "meta", "cpu", segments=torch.zeros(3, 5, dtype=torch.long, device="meta")),
            wrong(
                ValueError,
                "mask",
                "segments",
                "both",
                mask=torch.ones(3, 5, dtype=torch.bool),
                segments=torch.zeros(3, 5, dtype=torch.long),
            ),
            wrong(TypeError, "state", "dict", "return_state", state={}),
        ],
    )
    def test_inputs(self, prior: str, inputs: dict, error: type[Exception], words: tuple[str, ...]):
        m = FreeEnergyMixer(DIM, HEADS, prior)
        with pytest.raises(error) as raised:
            m(**{"x": torch.zeros(3, 5, DIM), **inputs})
        for word in words:
            assert word in str(raised.value), str(raised.value)

    @pytest.mark.parametrize("prior", PRIORS)
    def test_a_state_that_does_not_fit(self, prior: str):
        m, x = FreeEnergyMixer(DIM, HEADS, prior), torch.zeros(3, 5, DIM)
        _, state = m(x, return_state=True)
        _, other = FreeEnergyMixer(DIM, HEADS, prior)(x, return_state=True)
        with pytest.raises(ValueError, match="state belongs to another mixer"):
            m(x, state=other)
        with pytest.raises(ValueError, match="state has batch size 3; x has 2"):
            m(x[:2], state=state)
        with pytest.raises(ValueError, match="state is on cpu; x is on meta"):
            m(x.to("meta"), state=state)

    @pytest.mark.parametrize("prior", PRIORS)
    def test_an_encoder_has_no_state(self, prior: str):
        m, x = FreeEnergyMixer(DIM, HEADS, prior, causal=False), torch.zeros(3, 5, DIM)
        with pytest.raises(ValueError, match=r"state.*causal=True.*causal=False"):
            m(x, return_state=True)
        _, state = FreeEnergyMixer(DIM, HEADS, prior)(x, return_state=True)
        with pytest.raises(ValueError, match=r"state.*causal=True.*causal=False"):
            m(x, state=state)
