"""Properties that every prior shares, over all registered priors and their variants (see matrix.py): streams, padding,
segments, causality, encoders, the definition.
"""

from __future__ import annotations

import pytest
import torch
from contract import EveryEncoder, EveryMixer
from matrix import (
    BATCH,
    EXACT,
    LENGTH,
    MASK,
    SEGMENTS,
    Variant,
    assert_close,
    outcome,
    plain_mixer,
    separately,
    tokens,
    variants,
)
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS


@variants()
class TestEveryPrior(EveryMixer):
    """What they share with the rivals."""


@variants()
class TestEveryEncoder(EveryEncoder):
    """What they share with the rivals."""


class TestStreaming:
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


class TestSegments:
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


class TestEncoder:
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
