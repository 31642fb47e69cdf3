"""Properties that every prior shares, over all registered priors and their variants (see matrix.py): streams, padding,
segments, causality, encoders, the definition.
"""

from __future__ import annotations

import contract
import pytest
import torch
from matrix import (
    BATCH,
    EXACT,
    LENGTH,
    MASK,
    ROUNDING,
    SEGMENTS,
    Variant,
    assert_close,
    outcome,
    plain_mixer,
    separately,
    streamed,
    tokens,
    variants,
)
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS

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
        contract.full_is_chunked(variant.build(), sizes)

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
        contract.what_was_made_for_inference_can_be_gone_on_from_with_gradients(variant.build())

    @variants()
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_an_empty_chunk_changes_nothing(self, variant: Variant, mode):
        with mode():
            contract.an_empty_chunk_changes_nothing(variant.build())

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
        contract.rows_of_a_state_go_on_as_their_own_batch(variant.build())


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
        contract.padded_is_unpadded(variant.build())

    @variants()
    def test_a_padded_stream_is_unpadded(self, variant: Variant):
        m, x = variant.build(), tokens(batch=len(MASK))
        assert_streams(m, x, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), mask=MASK)

    @variants()
    def test_a_mask_may_come_and_go_in_a_stream(self, variant: Variant):
        contract.a_mask_may_come_and_go_in_a_stream(variant.build())

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("content", [1e4, torch.inf, torch.nan])
    def test_content_of_padding_is_irrelevant(self, variant: Variant, content: float, causal: bool):
        contract.content_of_padding_is_irrelevant(variant.build(causal=causal), content)

    @variants()
    @pytest.mark.parametrize("causal", [True, False])
    def test_everything_padding_gives_zero(self, variant: Variant, causal: bool):
        contract.nothing_but_padding_gives_zero(variant.build(causal=causal))

    @variants()
    def test_a_stream_that_begins_with_only_padding_begins_later(self, variant: Variant):
        contract.a_stream_that_begins_with_only_padding_begins_later(variant.build())


class TestSegments:
    @variants()
    def test_packed_is_separate(self, variant: Variant):
        contract.packed_is_separate(variant.build())

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
        contract.a_larger_future_leaves_the_past_alone(variant.build(dtype=torch.float32), start, factor)

    @variants()
    def test_the_past_has_no_gradient_in_the_future(self, variant: Variant):
        contract.the_past_has_no_gradient_in_the_future(variant.build(), factor=1e3)


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
