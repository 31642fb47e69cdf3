"""Parameters: every mixer has those of standard attention, 4 dim^2 weights, up to the rounding of widths to heads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from femixer import FreeEnergyMixer
from femixer.budget import solve_widths
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.priors import PRIORS

PARTS = ["", "L", "G", "LT", "LG", "LTG", "C", "CL", "CG", "CLT", "CLG", "CLTG"]
WITHOUT_KEYS = [prior for prior, kind in PRIORS.items() if not kind.queries_and_keys]
SIZES = [(24, 3), (96, 4), (96, 12), (120, 5), (512, 8), (768, 12)]


def weights(m: FreeEnergyMixer) -> int:
    """Entries of the projection matrices, without biases and conditioner, and without what a prior has per channel."""
    linears = [m.out_proj, m.value_proj.linear, *([] if m.prior_proj is None else [m.prior_proj.linear])]
    low_rank = [p for name, p in m.prior.named_parameters() if name in ("decay_map", "delta_map")]
    return sum(linear.weight.numel() for linear in linears) + sum(p.numel() for p in low_rank)


def gates(parts: str) -> int:
    return ("T" in parts) + ("G" in parts)


@pytest.mark.parametrize(
    ("prior", "budget"),
    [(prior, "attention") for prior in PRIORS] + [(prior, "balanced") for prior in PRIORS if prior not in WITHOUT_KEYS],
)
@pytest.mark.parametrize("parts", ["", "LT", "CLTG"])  # all numbers of gates
@pytest.mark.parametrize(("dim", "heads"), SIZES)
def test_every_mixer_has_the_weights_of_attention(prior: str, budget: str, parts: str, dim: int, heads: int):
    m = FreeEnergyMixer(dim, heads, prior, parts=parts, budget=budget, device="meta")
    columns = weights(m) / dim
    # d is rounded by half a channel of every head at most, in value, output and gates; q and k by one channel each.
    rounding = (2 + gates(parts)) * heads / 2 + 2 * heads
    assert abs(columns - 4 * dim) <= rounding


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("dim", "heads"), SIZES)
@pytest.mark.parametrize("budget", ["attention", "balanced"])
def test_softmax_widths_round_by_half_a_channel_at_most(budget: str, rope: bool, parts: str, dim: int, heads: int):
    """attention: d alone is rounded. balanced: q and k, which take what d leaves, alone (to even widths with RoPE)."""
    m = FreeEnergyMixer(dim, heads, parts=parts, budget=budget, rope=rope, device="meta")
    n, key, value = gates(parts), m.widths.key, m.widths.value
    assert key % 2 == 0 or not rope
    excess = abs(weights(m) / dim - 4 * dim)
    if budget == "attention":
        even = key - dim // heads
        assert even in ((0, 1) if rope else (0,))
        assert abs(value - 2 * dim / (2 + n) / heads) <= 0.5
        assert excess <= (2 + n) * heads / 2 + 2 * heads * even
    else:
        assert abs(value - 4 * dim / (4 + n) / heads) <= 0.5
        assert excess <= 2 * heads * (1 if rope else 0.5)
    exact = {"attention": 2 * dim % ((2 + n) * heads) == 0, "balanced": 4 * dim % ((4 + n) * heads) == 0}[budget]
    if exact and (not rope or (dim // heads % 2 == 0 and value % 2 == 0)):
        assert excess == 0


@pytest.mark.parametrize("parts", ["", "L", "LT", "CLTG"])
@pytest.mark.parametrize(("dim", "heads"), SIZES)
def test_a_chosen_value_dim_leaves_the_rest_to_queries_and_keys(parts: str, dim: int, heads: int):
    for per_head in range(1, 2 * dim // heads, 1 if dim < 100 else 7):
        most = 4 * dim - (2 + gates(parts)) * per_head * heads
        if most < 2 * 2 * heads:
            break
        m = FreeEnergyMixer(dim, heads, parts=parts, value_dim=per_head * heads, device="meta")
        assert m.widths.value == per_head
        assert abs(weights(m) / dim - 4 * dim) <= 2 * heads


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("budget", ["attention", "balanced"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(96, 4, 1), (96, 4, 2), (96, 12, 3), (512, 8, 2), (768, 12, 4)])
def test_grouped_heads_have_the_weights_of_grouped_attention(budget, rope, parts, dim, heads, kv_heads):
    m = FreeEnergyMixer(dim, heads, parts=parts, budget=budget, kv_heads=kv_heads, rope=rope, device="meta")
    grouped_attention = 2 * dim + 2 * dim * kv_heads // heads
    per_value_channel = (1 + gates(parts)) * heads + kv_heads
    if budget == "attention":
        rounding = per_value_channel / 2 + (heads + kv_heads) * (m.widths.key - dim // heads)
    else:
        rounding = (heads + kv_heads) * (1 if rope else 0.5)
    assert abs(weights(m) / dim - grouped_attention) <= rounding


@pytest.mark.parametrize(("dim", "heads"), SIZES)
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_no_parts_is_standard_attention_to_the_parameter(dim: int, heads: int, kv_heads: int | None):
    m = FreeEnergyMixer(dim, heads, parts="", kv_heads=kv_heads, rope=False, device="meta")
    groups = kv_heads or heads
    assert m.widths == (dim // heads, dim // heads)
    assert weights(m) == 2 * dim**2 + 2 * dim * groups * (dim // heads)
    if kv_heads is None:
        attention = nn.MultiheadAttention(dim, heads, device="meta")
        assert sum(p.numel() for p in m.parameters()) == sum(p.numel() for p in attention.parameters())


# Design section 5: d as a fraction of dim for CLTG, for one gate, and for parts="".
TABLE = {
    ("softmax", "attention"): (1 / 2, 2 / 3, 1),
    ("softmax", "balanced"): (2 / 3, 4 / 5, 1),
    ("linear", "attention"): (1 / 2, 2 / 3, 1),
    ("linear", "balanced"): (2 / 3, 4 / 5, 1),
    ("gla", "attention"): (1 / 2, 2 / 3, 1),
    ("aft", "attention"): (4 / 5, 1, 4 / 3),
    ("decay", "attention"): (4 / 5, 1, 4 / 3),
    ("ssm", "attention"): (1, 4 / 3, 2),
}


@pytest.mark.parametrize(("prior", "budget"), [key for key in TABLE if key[0] in PRIORS])
def test_the_table_of_widths(prior: str, budget: str):
    dim, heads = 960, 4
    for parts, fraction in zip(("CLTG", "LT", ""), TABLE[prior, budget], strict=True):
        m = FreeEnergyMixer(dim, heads, prior, parts=parts, budget=budget, device="meta")
        assert m.widths.value * heads == pytest.approx(fraction * dim, abs=heads / 2)


@pytest.mark.parametrize(("own_columns", "prior"), [((0.0, 1.0), "aft"), ((0.0, 1.0), "decay"), ((0.0, 0.0), "ssm")])
def test_priors_without_queries_and_keys_spend_their_budget_on_values(own_columns: tuple[float, float], prior: str):
    for gates, fraction in zip((2, 1, 0), TABLE[prior, "attention"], strict=True):
        widths = solve_widths(960, 4, 4, gates, "attention", None, False, own_columns)
        assert widths.key == 0
        assert widths.value * 4 == pytest.approx(fraction * 960, abs=2)


@pytest.mark.parametrize("prior", WITHOUT_KEYS)
def test_a_budget_of_queries_and_keys_is_refused_where_there_are_none(prior: str):
    message = f"budget='balanced' does not fit prior='{prior}': it has no queries and keys; choose 'attention'"
    with pytest.raises(ValueError, match=re.escape(message)):
        FreeEnergyMixer(24, 3, prior, budget="balanced")
    with pytest.raises(ValueError, match="budget='large' is unknown"):
        FreeEnergyMixer(24, 3, prior, budget="large")


@pytest.mark.parametrize("prior", WITHOUT_KEYS)
def test_a_hybrid_spends_a_budget_where_it_has_queries_and_keys(prior: str):
    sizes = {"vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    for budget in ("attention", "balanced"):
        model = FEMForCausalLM(FEMConfig(**sizes, prior=[prior, "softmax"], budget=budget))
        found = [layer.mixer.widths for layer in model.model.layers]
        assert found == [FreeEnergyMixer(24, 3, prior).widths, FreeEnergyMixer(24, 3, budget=budget).widths]


@pytest.mark.parametrize(
    "options",
    [*({"prior": prior} for prior in WITHOUT_KEYS), {"prior": ["aft", "ssm"]}, {"mixer": "attention"}],
    ids=str,
)
def test_a_model_without_queries_and_keys_refuses_their_budget(options: dict[str, Any]):
    FEMConfig(**options, budget="attention")
    with pytest.raises(StrictDataclassError, match="budget='balanced' is not allowed; choose 'attention'"):
        FEMConfig(**options, budget="balanced")


@pytest.mark.parametrize("options", [{}, {"parts": "CG"}, {"prior": ["softmax", "aft"]}], ids=str)
def test_a_model_has_values_of_the_width_that_is_asked_for(options: dict[str, Any]):
    sizes = {"vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = FEMForCausalLM(FEMConfig(**sizes, **options, value_dim=9))
    assert [layer.mixer.widths.value for layer in model.model.layers] == [3, 3]
    parts = {"parts": options.get("parts", "CLTG")}
    assert model.model.layers[0].mixer.widths == FreeEnergyMixer(24, 3, **parts, value_dim=9).widths


def test_a_model_without_free_energy_mixers_refuses_a_width_of_their_values():
    with pytest.raises(StrictDataclassError, match="value_dim=9 is not allowed; choose None: no layer is a"):
        FEMConfig(hidden_size=24, num_attention_heads=3, mixer="attention", value_dim=9)
    with pytest.raises(StrictDataclassError, match="value_dim=0 is not allowed; choose a whole number from 1"):
        FEMConfig(hidden_size=24, num_attention_heads=3, value_dim=0)
    with pytest.raises(ValueError, match="value_dim=10 must be a positive multiple of heads=3"):
        FEMForCausalLM(FEMConfig(hidden_size=24, num_attention_heads=3, value_dim=10))


@pytest.mark.parametrize(("dim", "heads"), [(256, 4), (512, 8), (768, 12)])
def test_the_conditioner_is_small(dim: int, heads: int):
    """About 1.5 % of a model whose other half is a feed-forward net: about 5 % of a mixer."""
    with_c, without = (FreeEnergyMixer(dim, heads, parts=parts, device="meta") for parts in ("CLTG", "LTG"))
    extra = sum(p.numel() for p in with_c.parameters()) - sum(p.numel() for p in without.parameters())
    assert 0 < extra / (4 * dim**2) < 0.06
    assert with_c.conditioner.channels == min(heads * with_c.widths.value // 16, dim // 32)


def test_wide_heads_have_equal_stream_and_key_widths():
    """At d = dim / 2 the stream [v, exp] has exactly attention's shape."""
    m = FreeEnergyMixer(512, 8, device="meta")
    assert 2 * m.widths.value == m.widths.key == 64
    assert m.out_proj.weight.device == torch.device("meta")
