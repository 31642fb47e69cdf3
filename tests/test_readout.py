"""The second readout, E_q[v] with q proportional to p exp(beta v), for every prior and every use of a mixer."""

from typing import Any

import pytest
import torch
from contract import EveryMixer
from matrix import EXACT, Variant, assert_close, noise, outcome, tokens, variants
from torch import Tensor

from femixer import FreeEnergyMixer, posterior_mean
from femixer.gates import outer_gate, temperature_gate
from femixer.layout import Past, arrange

READOUT = {"readout": "posterior_mean"}


def dense(m: FreeEnergyMixer, x: Tensor, **given: Tensor) -> Tensor:
    """The mixer from its definition on the dense prior."""
    projected, layout = m.prepare(x, **given)
    p = m.prior.weights(projected.inputs, layout, None, torch.float64)
    p = p.expand(x.shape[0], *p.shape[1:])
    v = m.prior.over_index(projected.v).repeat_interleave(m.heads // m.kv_heads, 2).transpose(1, 2)
    average = "bhtsd,bhsd->bthd" if p.dim() == 5 else "bhts,bhsd->bthd"
    mean, weights = torch.einsum(average, p, v), (m.beta_max[:, None] * v).exp()
    read = torch.einsum(average, p, weights * v) / torch.einsum(average, p, weights).clamp_min(1e-300)
    if projected.lam is not None:
        lam = temperature_gate(projected.lam)
        read = (1 - lam) * mean + lam * read
    if projected.gate is not None:
        read = read * outer_gate(projected.gate)
    y = m.out_proj(read.flatten(-2))
    return y if layout.padding is None else y.masked_fill(layout.padding[..., None], 0)


@variants("CLTG", "L", "grouped", "channel", "unnormalized", "groupedwindow", "alibi")
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_are_the_definition_s(variant: Variant, causal: bool) -> None:
    m, x = variant.build(causal=causal, **READOUT), tokens(2, 13)
    assert_close(outcome(m, m, x), outcome(m, lambda x: dense(m, x), x), EXACT)


@variants("CLTG", "channel", "expcache", **READOUT)
class TestEveryPrior(EveryMixer):
    """Streams, padding, segments, states: what every mixer keeps."""


@variants("L", "channelL")
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_posterior_mean_is_exact_in_float32_at_any_range(variant: Variant, size: float) -> None:
    """beta v up to 1e4, and what comes later decides nothing before."""
    m, x = variant.build(dtype=torch.float32, **READOUT), tokens(2, 37, dtype=torch.float32)
    projected, _ = m.prepare(x)
    layout, _ = arrange(x, None, None, Past())
    v = (size / 6 * noise(*projected.v.shape, seed=5)).float()
    v[:, -3] *= 1e4 / size
    v[:, 4] = 0
    v.requires_grad_()
    beta = (0.5 + noise(*m._beta().shape, seed=6).abs()).float()
    beta = beta[:, :1].expand_as(beta).contiguous() if m.prior.one_temperature else beta
    inputs = {name: given.detach() for name, given in projected.inputs.items()}
    _, best, _ = m.prior.read_posterior(inputs, v, beta, layout, None, False)
    p = m.prior.weights(inputs, layout).detach()
    p = p.expand(2, *p.shape[1:])
    over = m.prior.over_index(v.double()).transpose(1, 2)
    expected = posterior_mean(p, over, beta.double()[:, None]).transpose(1, 2)
    assert best.dtype == torch.float32 and bool(best.isfinite().all())
    assert bool(((best - expected).abs() <= 1e-5 * expected.abs().clamp_min(1)).all())
    some = noise(*best.shape, seed=7)
    gradients = [torch.autograd.grad((read * some).sum(), v)[0] for read in (best, expected)]
    most = (beta * v).abs().max().item()
    assert_close({"dv": gradients[0]}, {"dv": gradients[1]}, max(1e-4, 8 * torch.finfo(torch.float32).eps * most))


@pytest.mark.parametrize("options", [{}, {"parts": "L"}, {"causal": False, "kv_heads": 1}], ids=str)
def test_inspection_reads_what_the_mixer_reads(options: dict[str, Any]) -> None:
    m, x = Variant("softmax", "", options).build(**READOUT), tokens(2, 7)
    r = m.inspect(x)
    torch.testing.assert_close(r.read, torch.lerp(r.mean, r.posterior_mean, r.lam))
    assert bool((r.free_energy <= r.posterior_mean + 1e-12).all()) and not torch.equal(r.free_energy, r.posterior_mean)
    y = m.out_proj((r.gate * r.read).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(m(x), y)


def test_a_readout_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="readout='max' is unknown; choose one of free_energy, posterior_mean"):
        FreeEnergyMixer(24, 3, readout="max")
    with pytest.raises(ValueError, match="readout='posterior_mean' does not fit parts='CG'"):
        FreeEnergyMixer(24, 3, parts="CG", **READOUT)
