"""Properties that every baseline shares with FreeEnergyMixer, over all of BASELINES and some of their options."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import contract
import pytest
import torch
from matrix import (
    BATCH,
    DIM,
    EXACT,
    LENGTH,
    MASK,
    ROUNDING,
    SEGMENTS,
    assert_close,
    noise,
    outcome,
    stir,
    streamed,
    tokens,
)
from torch import Tensor, nn

from femixer.baselines import BASELINES
from femixer.baselines.base import Baseline
from femixer.state import Growing

HEADS = 4
CHUNKS = [1, 4, 9, 1, 8]

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {"grouped": {"kv_heads": 2}},
    "gated-attention": {"headwise": {"gate": "headwise", "kv_heads": 2, "bias": True}},
    "gated-deltanet": {"published": {"expand_k": 0.75, "expand_v": 1.5, "bias": True}},
    "hgrn": {"complex": {"complex": True, "lower_bound": 0.3}},
    "linear-attention": {"learned": {"feature_map": "learned"}},
    "retnet": {"published": {"expand": 2.0}},
}

# Parameters in units of 4 dim² at dim 128 and 16 heads, as the classes state them; about one where nothing stands here.
RATIOS = {
    "gated-attention": 0.94,
    "gsa": 1.25,
    "hyena": 1.31,
    "kda": 1.12,
    "mamba": 1.78,
    "mamba2": 1.69,
    "rwkv6": 1.12,
    "rwkv7": 1.3,
    "tnn": 1.14,
}
# The others have a state of constant size.
GROWING = ("attention", "diff-transformer", "fox", "gated-attention", "hyena", "laser", "path", "tnn")


@dataclass(frozen=True)
class Variant:
    baseline: str
    options: dict[str, Any] = field(hash=False)

    def build(self, dim: int = DIM, heads: int = HEADS, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
        return stir(BASELINES[self.baseline](dim, heads, dtype=dtype, **{**self.options, **more}))


def variants(with_options: bool = True, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize a test over all registered baselines, with the variants of OPTIONS or without."""
    chosen = []
    for name in BASELINES:
        if name in without:
            continue
        chosen.append(pytest.param(Variant(name, {}), id=name))
        for option, options in OPTIONS.get(name, {}).items() if with_options else ():
            chosen.append(pytest.param(Variant(name, options), id=f"{name}-{option}"))
    return pytest.mark.parametrize("variant", chosen)


def size_of(part: Any) -> int:
    """Numbers that a state holds."""
    if isinstance(part, Growing):
        return part.tensor.numel()
    if isinstance(part, tuple):
        return sum(map(size_of, part))
    return part.numel() if isinstance(part, Tensor) else 0


class TestStreaming:
    @variants()
    @pytest.mark.parametrize("sizes", [CHUNKS, [1] * LENGTH], ids=["chunks", "tokens"])
    def test_full_is_chunked_is_token_by_token(self, variant: Variant, sizes: list[int]):
        contract.full_is_chunked(variant.build(), sizes)

    @variants()
    def test_a_long_stream_is_cut_anywhere(self, variant: Variant):
        """Longer than a chunk of any kernel, and not cut where the kernels cut."""
        m, x = variant.build(), tokens(batch=1, length=151)
        with torch.no_grad():
            assert_close({"y": streamed(m, x, [41, 71, 39])}, {"y": m(x)}, EXACT)

    @variants(with_options=False)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_in_single_precision(self, variant: Variant, mode):
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        with mode():
            y = streamed(m, x, [5, *[1] * 11, 7])
            assert y.dtype == x.dtype
            assert_close({"y": y}, {"y": m(x)}, ROUNDING)

    @variants()
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_a_state_is_a_value(self, variant: Variant, mode):
        """Two continuations of one state are both right, and it goes on a second time as it did at first."""
        m, x, other = variant.build(), tokens(), tokens(seed=2)
        other[:, :7] = x[:, :7]
        with mode():
            _, state = m(x[:, :6], return_state=True)
            _, state = m(x[:, 6:7], state=state, return_state=True)
            first, one = m(x[:, 7:8], state=state, return_state=True)
            second, two = m(other[:, 7:8], state=state, return_state=True)
            first_rest, _ = m(x[:, 8:], state=one, return_state=True)
            second_rest, _ = m(other[:, 8:], state=two, return_state=True)
            again, _ = m(x[:, 7:8], state=state, return_state=True)
            assert torch.equal(first, again)
            assert_close({"y": torch.cat([first, first_rest], 1)}, {"y": m(x)[:, 7:]}, EXACT)
            assert_close({"y": torch.cat([second, second_rest], 1)}, {"y": m(other)[:, 7:]}, EXACT)

    @variants(with_options=False)
    def test_what_was_made_for_inference_can_be_gone_on_from_with_gradients(self, variant: Variant):
        contract.what_was_made_for_inference_can_be_gone_on_from_with_gradients(variant.build())

    @variants(with_options=False)
    def test_an_empty_chunk_changes_nothing(self, variant: Variant):
        with torch.no_grad():
            contract.an_empty_chunk_changes_nothing(variant.build())

    @variants()
    def test_rows_of_a_state_go_on_as_their_own_batch(self, variant: Variant):
        contract.rows_of_a_state_go_on_as_their_own_batch(variant.build())

    @variants(without=GROWING)
    def test_a_state_stays_as_small_as_it_is(self, variant: Variant):
        m, x = variant.build(), tokens()
        with torch.no_grad():
            _, few = m(x[:, :2], return_state=True)
            _, many = m(x[:, 2:], state=few, return_state=True)
        assert size_of(few.prior) == size_of(many.prior) > 0


class TestLayout:
    @variants()
    def test_padded_is_unpadded(self, variant: Variant):
        contract.padded_is_unpadded(variant.build())

    @variants()
    def test_packed_is_separate(self, variant: Variant):
        contract.packed_is_separate(variant.build())

    @variants()
    def test_streams_may_be_padded_and_packed(self, variant: Variant):
        m, x = variant.build(), tokens()
        with torch.no_grad():
            for name, given in (("mask", MASK[:BATCH]), ("segments", SEGMENTS)):
                wanted = m(x, **{name: given})
                for sizes in (CHUNKS, [1] * LENGTH):
                    assert_close({"y": streamed(m, x, sizes, **{name: given})}, {"y": wanted}, EXACT)

    @variants(with_options=False)
    def test_a_mask_may_come_and_go_in_a_stream(self, variant: Variant):
        contract.a_mask_may_come_and_go_in_a_stream(variant.build())

    @variants()
    @pytest.mark.parametrize("content", [torch.inf, torch.nan])
    def test_content_of_padding_is_irrelevant(self, variant: Variant, content: float):
        contract.content_of_padding_is_irrelevant(variant.build(), content)

    @variants(with_options=False)
    def test_nothing_but_padding(self, variant: Variant):
        """Gives zero, and a stream that begins so begins later."""
        contract.nothing_but_padding_gives_zero(variant.build())
        contract.a_stream_that_begins_with_only_padding_begins_later(variant.build())


class TestCausality:
    @variants()
    def test_a_larger_future_leaves_the_past_alone(self, variant: Variant):
        contract.a_larger_future_leaves_the_past_alone(variant.build(dtype=torch.float32))

    @variants()
    def test_the_past_has_no_gradient_in_the_future(self, variant: Variant):
        contract.the_past_has_no_gradient_in_the_future(variant.build())


class TestNumerics:
    @variants()
    def test_gradients_are_those_of_the_function(self, variant: Variant):
        m, x = variant.build(dim=8, heads=2), noise(2, 5, 8).requires_grad_()
        ids = torch.tensor([[0, 0, -1, 1, 1], [0, 0, 0, 0, 0]])
        names, values = zip(*m.named_parameters(), strict=True)

        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            return torch.func.functional_call(m, dict(zip(names, parameters, strict=True)), (x,), {"segments": ids})

        assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)

    @variants()
    @pytest.mark.parametrize("factor", [0.0, 1e3])
    def test_extreme_inputs_stay_finite(self, variant: Variant, factor: float):
        m, x = variant.build(dtype=torch.float32), factor * tokens(dtype=torch.float32)
        assert all(value.isfinite().all() for value in outcome(m, m, x).values())

    @variants()
    def test_autocast_is_close_to_single_precision(self, variant: Variant):
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        with torch.no_grad():
            exact = m(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                whole, parts = m(x), streamed(m, x, [9, 1, 13])
        for y in (whole, parts):
            assert (y.float() - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()

    @variants(with_options=False)
    def test_a_half_precision_module_runs(self, variant: Variant):
        """Beside the same rounded weights in float32: errors are those of the projections, not of sums over tokens."""
        m, x = variant.build(dtype=torch.bfloat16), tokens(batch=1, length=257, dtype=torch.bfloat16)
        with torch.no_grad():
            y, exact = streamed(m, x, [256, 1]), copy.deepcopy(m).float()(x.float())
        assert y.dtype == torch.bfloat16
        assert (y.float() - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()

    # torch about itself: its tracing and its imports.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
    @variants(with_options=False)
    def test_one_graph_equals_eager(self, variant: Variant):
        torch._dynamo.reset()
        m, x = variant.build(), tokens()
        compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
        assert_close(outcome(m, compiled, x), outcome(m, m, x), EXACT)


class TestModule:
    @variants()
    def test_copies_are_mixers_of_their_own(self, variant: Variant):
        m, x = variant.build(), tokens()
        before, state = m(x, return_state=True)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert torch.equal(other(x), before)
            with torch.no_grad():
                other.out_proj.weight.mul_(2)
            assert torch.equal(m(x), before)
            if isinstance(m, Baseline):
                with pytest.raises(ValueError, match="state belongs to another mixer"):
                    other(x, state=state, return_state=True)

    @variants()
    def test_every_parameter_is_made_as_asked(self, variant: Variant):
        made = BASELINES[variant.baseline](DIM, HEADS, device="meta", dtype=torch.bfloat16, **variant.options)
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.bfloat16)}

    @variants()
    def test_reset_parameters_restores_every_parameter(self, variant: Variant):
        m = BASELINES[variant.baseline](DIM, HEADS, **variant.options)
        starts = []
        for seed in (1, 2):
            stir(m, seed)
            torch.manual_seed(0)
            m.reset_parameters()
            starts.append({name: p.detach().clone() for name, p in m.named_parameters()})
        assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])

    @variants(with_options=False)
    def test_dropout_acts_on_what_goes_into_the_output_projection(self, variant: Variant):
        contract.dropout_acts_in_training_on_what_goes_into_the_output_projection(variant.build(dropout=0.25))

    @variants()
    def test_no_sequences_no_tokens_one_token(self, variant: Variant):
        m, x = variant.build(), tokens()
        for empty in (x[:0], x[:, :0]):
            y, _ = m(empty, return_state=True)
            assert y.shape == empty.shape
        whole = m(x)
        assert_close({"y": m(x[:, :1])}, {"y": whole[:, :1]}, EXACT)
        assert_close({"y": m(x[1:2])}, {"y": whole[1:2]}, EXACT)

    @variants(with_options=False)
    def test_parameters_are_about_those_of_attention(self, variant: Variant):
        m = BASELINES[variant.baseline](128, 16, bias=False)
        count = sum(p.numel() for p in m.parameters())
        assert count / (4 * 128**2) == pytest.approx(RATIOS.get(variant.baseline, 1.04), abs=0.05)


@variants(with_options=False)
class TestErrors:
    def test_a_baseline_is_causal(self, variant: Variant):
        if BASELINES[variant.baseline].encoder:
            assert not variant.build(causal=False).causal
            return
        with pytest.raises(ValueError, match=r"causal=False is not allowed: .* is causal by definition"):
            variant.build(causal=False)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"dim": 25}, "dim=25"),
            ({"dim": 0}, "dim=0"),
            ({"heads": 0}, "heads=0"),
            ({"dropout": 1.0}, "dropout=1.0"),
        ],
    )
    def test_constructor(self, variant: Variant, options: dict, words: str):
        with pytest.raises(ValueError, match=words):
            BASELINES[variant.baseline](**{"dim": DIM, "heads": HEADS, **options})

    def test_inputs(self, variant: Variant):
        m = BASELINES[variant.baseline](DIM, HEADS)
        x = torch.zeros(3, 5, DIM)
        for error, words, given in (
            (ValueError, r"x has shape \(3, 5, 23\)", {"x": x[..., 1:]}),
            (TypeError, "x has dtype torch.float64", {"x": x.double()}),
            (ValueError, r"mask has shape \(3, 4\)", {"mask": torch.ones(3, 4, dtype=torch.bool)}),
            (TypeError, "segments has dtype torch.float32", {"segments": x[..., 0]}),
            (TypeError, "state must come from", {"state": {}}),
        ):
            with pytest.raises(error, match=words):
                m(**{"x": x, **given})
        _, state = m(x, return_state=True)
        with pytest.raises(ValueError, match="state has batch size 3; x has 2"):
            m(x[:2], state=state)


WRONG_OPTIONS = [
    ("deltanet", {"conv_width": 0}),
    ("diff-transformer", {"depth": 0}),
    ("diff-transformer", {"heads": 3}),
    ("diff-transformer", {"heads": 8}),  # of three channels
    ("fox", {"expand": -1.0}),
    ("fox", {"variant": "max"}),
    ("gated-attention", {"expand": 0.0}),
    ("gated-attention", {"gate": "channel"}),
    ("gated-deltanet", {"conv_width": 2.5}),
    ("gated-deltanet", {"expand_k": 0}),
    ("gated-deltanet", {"expand_v": -1.0}),
    ("gla", {"rank": 0}),
    ("gsa", {"slots": 0}),
    ("hgrn", {"lower_bound": -0.1}),
    ("hgrn", {"lower_bound": 1.0}),
    ("hgrn2", {"lower_bound": 1.0}),
    ("hyena", {"bands": 0}),
    ("hyena", {"filter_width": 0}),
    ("hyena", {"length": 0}),
    ("kda", {"conv_width": 0}),
    ("kda", {"rank": 0}),
    ("linear-attention", {"feature_map": "relu"}),
    ("mamba", {"conv_width": 0}),
    ("mamba", {"expand": 0}),
    ("mamba", {"rank": 0}),
    ("mamba", {"state_size": 0}),
    ("mamba2", {"expand": -1}),
    ("mamba2", {"state_size": 0}),
    ("path", {"conv_width": 1.5}),
    ("path", {"rank": 0}),
    ("retnet", {"expand": 0}),
    ("retnet", {"rope_base": -1}),
    ("rwkv6", {"expand_k": 0}),
    ("rwkv6", {"rank": 1.5}),
    ("rwkv7", {"decay_rank": 0}),
    ("rwkv7", {"gate_rank": 1.5}),
    ("tnn", {"decay": 1.5}),
    ("tnn", {"expand": 0.0}),
    ("tnn", {"layers": -1}),
]


@pytest.mark.parametrize(("name", "options"), WRONG_OPTIONS)
def test_wrong_options_are_named(name: str, options: dict[str, Any]):
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        BASELINES[name](DIM, **{"heads": HEADS, **options})
