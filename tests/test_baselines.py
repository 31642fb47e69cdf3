"""Properties that every baseline shares with FreeEnergyMixer, over all of BASELINES and some of their options."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from contract import EveryEncoder, EveryMixer
from matrix import (
    DIM,
    EXACT,
    ROUNDING,
    assert_close,
    noise,
    outcome,
    stir,
    streamed,
    tokens,
)
from torch import Tensor, nn

from femixer.baselines import BASELINES
from femixer.state import Growing

HEADS = 4

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

    @property
    def encodes(self) -> bool:
        return BASELINES[self.baseline].encoder

    @property
    def rounding(self) -> float:
        return 1e-3 if self.baseline == "hyena" else ROUNDING  # whose filter is a sine of large numbers here

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


@variants()
class TestEveryBaseline(EveryMixer):
    """What they share with free energy mixers."""


@variants(without=tuple(name for name, kind in BASELINES.items() if not kind.encoder))
class TestEveryEncoder(EveryEncoder):
    """What they share with free energy mixers."""


class TestStreaming:
    @variants()
    def test_a_long_stream_is_cut_anywhere(self, variant: Variant):
        """Longer than a chunk of any kernel, and not cut where the kernels cut."""
        m, x = variant.build(), tokens(batch=1, length=151)
        with torch.no_grad():
            assert_close({"y": streamed(m, x, [41, 71, 39])}, {"y": m(x)}, EXACT)

    @variants()
    @torch.no_grad()
    def test_a_larger_future_in_a_later_chunk_leaves_the_past_alone(self, variant: Variant):
        m, x = variant.build(dtype=torch.float32), tokens(length=71, dtype=torch.float32)
        wild = x.clone()
        wild[:, 37:] *= 1e4
        y = m(wild)
        assert y.isfinite().all()
        assert_close({"y": y[:, :37]}, {"y": m(x)[:, :37]}, variant.rounding)

    @variants(without=GROWING)
    def test_a_state_stays_as_small_as_it_is(self, variant: Variant):
        m, x = variant.build(), tokens()
        with torch.no_grad():
            _, few = m(x[:, :2], return_state=True)
            _, many = m(x[:, 2:], state=few, return_state=True)
        assert size_of(few.prior) == size_of(many.prior) > 0


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
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_half_precision_module_runs(self, variant: Variant, dtype: torch.dtype):
        """Beside the same rounded weights in float32: errors are those of the projections, not of sums over tokens."""
        m, x = variant.build(dtype=dtype), tokens(batch=1, length=257, dtype=dtype)
        with torch.no_grad():
            y, exact = streamed(m, x, [256, 1]), copy.deepcopy(m).float()(x.float())
        assert y.dtype == dtype
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


WRONG_OPTIONS = [
    ("attention", {"heads": 8}),  # of three channels
    ("attention", {"kv_heads": 3}),
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
