"""What `inspect` shows is what the mixer computes, and what the definitions say."""

from pathlib import Path

import pytest
import torch
from matrix import stir

from femixer import FreeEnergyMixer, free_energy, posterior_mean
from femixer.inspection import inspection
from femixer.priors import PRIORS

FIELDS = ("value", "mean", "free_energy", "read", "lam", "gate", "posterior_mean", "hidden_beta", "kl")


def mixer(parts: str = "CLTG", prior: str = "softmax", **options) -> FreeEnergyMixer:
    torch.manual_seed(0)
    return stir(FreeEnergyMixer(24, 3, prior=prior, parts=parts, dtype=torch.float64, **options))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("parts", ["", "C", "G", "L", "LG", "LT", "CLTG"])
def test_gated_read_of_the_inspection_is_the_mixers_output(prior, parts):
    m = mixer(parts, prior)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    r = m.inspect(x)
    y = m.out_proj((r.gate * r.read).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(y, m(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior", PRIORS)
def test_every_tensor_agrees_with_its_definition(prior):
    m = mixer(prior=prior)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    r = m.inspect(x)
    beta = m.beta_max[:, None]
    for name in FIELDS:
        assert getattr(r, name).shape == (2, 3, 11, m.widths.value), name
    assert r.posterior.shape == (2, 3, 11, 11, m.widths.value)
    torch.testing.assert_close(r.posterior.sum(-2), torch.ones_like(r.mean))
    torch.testing.assert_close(r.prior.sum(3), torch.ones_like(r.prior.sum(3)))
    p, v = r.prior, r.value
    if m.prior.one_temperature:  # the definitions hold on pairs of token and channel
        projected, layout = m.prepare(x)
        p, v = m.prior.weights(projected.inputs, layout), m.prior.over_index(projected.v).transpose(1, 2)
        torch.testing.assert_close(r.prior, m.prior.over_tokens(p))
    torch.testing.assert_close(r.free_energy, free_energy(p, v, beta))
    torch.testing.assert_close(r.posterior_mean, posterior_mean(p, v, beta))
    torch.testing.assert_close(free_energy(p, v, r.hidden_beta), r.read)
    # KL(q||p) = beta (E_q[v] - F) at the hidden temperature
    expected = r.hidden_beta * (posterior_mean(p, v, r.hidden_beta) - r.read)
    torch.testing.assert_close(r.kl, expected, rtol=1e-6, atol=1e-9)
    assert (r.hidden_beta <= beta + 1e-12).all() and (r.hidden_beta >= 0).all()
    assert (r.gate > 0).all() and ((r.lam > 0) & (r.lam < 1)).all()


@pytest.mark.parametrize("prior", ["softmax", "aft", "mamba-interactive"])
def test_some_of_the_posteriors_are_those_of_all_and_too_many_are_refused(prior, monkeypatch):
    m = mixer(prior=prior)
    r = m.inspect(torch.randn(2, 11, 24, dtype=torch.float64))
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "MOST_NUMBERS", 1)  # a query at a time
        some = r.posterior_of(1, 2, channels=[3, 0], rows=[7, 1, 10])
    torch.testing.assert_close(some, r.posterior[1, 2][[7, 1, 10]][..., [3, 0]])
    monkeypatch.setattr(inspection, "LARGEST", 10_000)
    again = m.inspect(torch.randn(1, 3, 24, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"the prior of 101 tokens would take 0\.\d GB; allowed are 0\.0: inspect fewer"
    ):
        m.inspect(torch.randn(1, 101, 24, dtype=torch.float64))
    monkeypatch.setattr(inspection, "LARGEST", 100)
    with pytest.raises(ValueError, match="the posteriors of 3 tokens would take"):
        again.posterior  # noqa: B018


def test_grouped_heads_are_inspected_per_query_head():
    m = mixer(kv_heads=1)
    r = m.inspect(torch.randn(2, 7, 24, dtype=torch.float64))
    assert r.prior.shape == (2, 3, 7, 7)
    assert torch.equal(r.value[:, 0], r.value[:, 2])
    assert not torch.allclose(r.prior[:, 0], r.prior[:, 2])


def test_padding_has_no_prior_and_reads_nothing():
    m = mixer()
    mask = torch.tensor([[False, True, True, False, True]])
    r = m.inspect(torch.randn(1, 5, 24, dtype=torch.float64), mask=mask)
    assert (r.prior[..., ~mask[0]] == 0).all() and (r.prior[:, :, ~mask[0]] == 0).all()
    for name in ("mean", "free_energy", "read", "kl"):
        assert (getattr(r, name)[:, :, ~mask[0]] == 0).all(), name
    assert all(torch.isfinite(getattr(r, name)).all() for name in FIELDS)


def test_inspection_keeps_dtype_and_leaves_no_graph():
    m = mixer().float()
    r = m.inspect(torch.randn(1, 5, 24))
    assert r.prior.dtype == r.kl.dtype == torch.float32
    assert not r.posterior.requires_grad


def test_plot_draws_a_png_for_chosen_channels_and_tokens(tmp_path: Path):
    r = mixer().inspect(torch.randn(1, 5, 24, dtype=torch.float64))
    r.plot(tmp_path / "all.png")
    r.plot(tmp_path / "some.png", head=2, row=3, channels=[0, 1], tokens=list("abcde"))
    for name in ("all.png", "some.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_default_channels_of_the_plot_look_at_different_places():
    from femixer.inspection.inspection import differing_channels

    posterior = torch.eye(7)[[0, 0, 0, 3, 5, 0]].T  # channels 0 1 2 5 read position 0, channel 3 reads 3, 4 reads 5
    chosen = differing_channels(posterior, 3)
    assert {3, 4} < set(chosen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 3}, "head=3"),
        ({"batch": 1}, "batch=1"),
        ({"row": 5}, "row=5"),
        ({"channels": [9]}, "channels=9"),
        ({"tokens": ["a"]}, "tokens has 1"),
    ],
)
def test_plot_refuses_what_is_not_there(tmp_path: Path, options, message):
    r = mixer().inspect(torch.randn(1, 5, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match=message):
        r.plot(tmp_path / "x.png", **options)
