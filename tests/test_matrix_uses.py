"""Every prior compiled, copied, at small sizes, with dropout, and what it says to wrong arguments (see matrix.py)."""

from __future__ import annotations

import io

import pytest
import torch
from matrix import (
    BATCH,
    DIM,
    EXACT,
    HEADS,
    LENGTH,
    MASK,
    ROUNDING,
    SEGMENTS,
    Variant,
    assert_close,
    outcome,
    plain_gate,
    tokens,
    variants,
)
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS

# One prior of each kind of kernel.
KINDS = ("softmax", "gla", "aft", "mamba")


def wrong(error: type[Exception], *words: str, **options: object):
    return pytest.param(options, error, words, id=" ".join(words))


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


class TestSmallSizes:
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


class TestDropout:
    @variants("CLTG")
    def test_dropout_does_nothing_in_evaluation(self, variant: Variant):
        m, x = variant.build(dropout=0.9).eval(), tokens()
        assert torch.equal(m(x), variant.build(dropout=0.0)(x))


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
