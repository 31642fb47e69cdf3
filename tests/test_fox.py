"""Forgetting attention as prior: what its gates do to the scores, and that long sums of them lose no digits. The matrix
tests the rest."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, outcome, reads_of, stir, tokens
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.layout import Layout
from femixer.models import FEMConfig
from femixer.models.block import build_mixer


def test_a_score_falls_by_the_gates_between_query_and_key_by_hand():
    """One head, equal scores: log p_t(i) - log p_t(t) is the sum of the gates after i, or from t on ahead of it."""
    m = FreeEnergyMixer(4, 1, prior="fox", rope=False, causal=False, dtype=torch.float64)
    with torch.no_grad():
        m.prior.decay_bias.zero_()
    gates = torch.tensor([-1.0, -0.5, -2.0, -0.25], dtype=torch.float64)
    logits = torch.log(torch.expm1(-gates))  # -softplus(logits) = gates
    inputs = {name: torch.zeros(1, 4, c.width, dtype=torch.float64) for name, c in m.prior.columns().items()}
    inputs["decay"] = logits[None, :, None]
    p = m.prior.weights(inputs, Layout(None, torch.arange(4)[None]))[0, 0]
    biases = torch.tensor(
        [[0.0, -1.0, -1.5, -3.5], [-0.5, 0.0, -0.5, -2.5], [-2.5, -2.0, 0.0, -2.0], [-2.75, -2.25, -0.25, 0.0]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(p, biases.softmax(-1))


def test_gates_of_one_are_softmax_attention():
    fox, softmax = (stir(FreeEnergyMixer(24, 3, prior=prior, dtype=torch.float64)) for prior in ("fox", "softmax"))
    own = {name: p for name, p in fox.state_dict().items() if "decay" not in name}
    for name, p in softmax.state_dict().items():
        p.copy_(own[name][: len(p)] if name.startswith("prior_proj") else own[name])
    with torch.no_grad():
        fox.prior.decay_bias.fill_(-100)
    assert_close({"y": fox(tokens())}, {"y": softmax(tokens())}, 1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_sums_of_gates_lose_no_digits_along_a_sequence(causal: bool):
    """4000 tokens that forget half: sums reach -2800, where float32 has steps of 2e-4, in the scores and gradients."""
    length, heads = 4001, 1
    m = FreeEnergyMixer(8, heads, prior="fox", rope=False, parts="L", causal=causal, dtype=torch.float32)
    with torch.no_grad():
        m.prior.decay_bias.zero_()
    inputs = {name: noise(1, length, c.width, seed=i).float() for i, (name, c) in enumerate(m.prior.columns().items())}
    v, beta = noise(1, length, 1, m.widths.value, seed=9).float(), m.beta_max.detach()
    layout, rows = Layout(None, torch.arange(length)[None]), torch.tensor([1, 2000, 3990, 4000])
    assert m.prior.log_decays(inputs, layout).sum() < -2500
    logits = inputs["decay"].requires_grad_()
    mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted = reads_of(m.prior.weights(wide, layout, rows), v.double(), beta.double())
    found: list[Tensor] = []
    for reads, leaf in (((mean[:, rows], free[:, rows]), logits), (wanted, wide["decay"])):
        weight = noise(*reads[0].shape, seed=3).to(leaf.dtype)
        found += [*(x.detach() for x in reads), *torch.autograd.grad(sum((x * weight).sum() for x in reads), leaf)]
    for name, actual, expected in zip(("mean", "free", "gradient"), found[:3], found[3:], strict=True):
        assert_close({name: actual}, {name: expected}, 2e-6)


def test_gradients_of_the_gates_go_through_windows_segments_and_wild_values():
    """In float32 against the same layer in float64, with values of some hundred nats, which are read again exactly."""
    segments = torch.tensor([[0] * 40 + [-1] * 3 + [1] * 30])
    x = tokens(batch=1, length=73, dim=16)
    for options in ({"window": 9}, {"causal": False}, {"causal": False, "window": 9}):
        m = stir(FreeEnergyMixer(16, 2, prior="fox", parts="LT", dtype=torch.float64, **options))
        with torch.no_grad():
            m.value_proj.linear.weight[: m.value_proj.columns["v"].width] *= 300
        expected = outcome(m, lambda x, m=m: m(x, segments=segments), x)
        actual = outcome(m.float(), lambda x, m=m: m(x, segments=segments), x.float())
        scale = {name: y.abs().max() for name, y in expected.items()}
        assert_close(*({n: y.double() / scale[n] for n, y in found.items()} for found in (actual, expected)), 2e-4)


def test_gates_start_with_memories_of_2_to_1000_tokens_and_one_alone_in_their_middle():
    def spans(bias: Tensor) -> Tensor:
        return 1 / F.softplus(bias.detach().double()).flatten()

    eight = spans(FreeEnergyMixer(64, 8, prior="fox").prior.decay_bias)
    assert eight[0].item() == pytest.approx(2, rel=1e-3)
    assert eight[-1].item() == pytest.approx(1000, rel=1e-2)
    scalar = FreeEnergyMixer(64, 8, prior="gla", prior_options={"decay": "scalar"}).prior
    assert spans(scalar.decay_bias).tolist() == pytest.approx([math.sqrt(2000)], rel=1e-3)
    gate = scalar.tracks(
        {name: noise(1, 5, c.width).float() for name, c in scalar.columns().items()},
        Layout(None, torch.arange(5)[None]),
        torch.float32,
    )["gate"]
    assert gate.shape == (1, 5, 8, 1)
    assert (gate == gate[:, :, :1]).all()
    assert gate[0, :, 0, 0].unique().numel() == 5


def test_a_model_has_windows_with_fox():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    assert build_mixer(FEMConfig(prior="fox", window=5, **sizes), 0).prior.window == 5


def test_padding_takes_no_operator_that_a_gpu_lacks():
    """Sums of gates are float64, for which Triton has no recurrence."""
    pytest.importorskip("triton")
    m = FreeEnergyMixer(32, 2, prior="fox", device="meta")
    x, keep = torch.empty(2, 19, 32, device="meta"), torch.ones(2, 19, dtype=torch.bool, device="meta")
    with use_backend("triton"):
        assert m(x, mask=keep).shape == x.shape
