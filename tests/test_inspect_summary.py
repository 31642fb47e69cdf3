"""`femixer inspect --summary`: parts that are switched off are off, and what is counted is what is read."""

import pytest
import torch
from matrix import stir

from femixer import FreeEnergyMixer
from femixer.inspection import inspect_model
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.tasks.lm.inspect import LEAVES, layers_usage, loss, parts_of, without
from femixer.training import journal

PRIORS = ("softmax", "gla", "aft", "mamba")


def mixer(prior: str, parts: str = "CLTG") -> FreeEnergyMixer:
    torch.manual_seed(0)
    return stir(FreeEnergyMixer(22, 2, prior=prior, parts=parts, dtype=torch.float64))


@pytest.mark.parametrize("prior", PRIORS)
def test_without_a_part_the_mixer_is_the_one_that_never_had_it(prior: str) -> None:
    layer, x = mixer(prior), torch.randn(2, 13, 22, dtype=torch.float64)
    (p, v, lam, _, _), layout = layer.prepare(x)
    whole, r = layer(x), layer.inspect(x)
    with without(layer, "L"):
        read = (r.mean * r.gate).transpose(1, 2).flatten(2)
        torch.testing.assert_close(layer(x), layer.out_proj(read))
    with without(layer, "G"):
        ungated, _ = layer.prior(p, v, layer._beta(), lam, None, layout, None, False)
        torch.testing.assert_close(layer(x), layer.out_proj(ungated.flatten(2)))
    with without(layer, "C"):
        without_features = layer(x)
    modulations = [m.modulation for m in (layer.prior_proj, layer.value_proj) if m is not None]
    with torch.no_grad():
        for modulation in modulations:
            assert modulation is not None
            modulation.zero_()
    torch.testing.assert_close(without_features, layer(x))
    assert not torch.allclose(whole, without_features)


def test_parts_come_back_also_after_an_error() -> None:
    layer, x = mixer("gla"), torch.randn(1, 7, 22, dtype=torch.float64)
    whole = layer(x)
    with pytest.raises(RuntimeError), without(layer, "L"), without(layer, "C"):
        raise RuntimeError
    assert torch.equal(layer(x), whole)
    assert parts_of(layer) == ["L", "G", "C"]
    assert parts_of(mixer("gla", "LT")) == ["L"]
    with pytest.raises(ValueError, match="part='T' is unknown; choose one of L, G, C"), without(layer, "T"):
        pass


def test_channels_that_leave_their_prior_are_counted() -> None:
    """A channel whose values are all alike cannot leave; one at a high temperature and far values does."""
    layer = mixer("softmax", "L")
    x = torch.randn(1, 17, 22, dtype=torch.float64)
    with torch.no_grad():
        rows = layer.value_proj.linear.weight.view(2, -1, 22)
        rows[:, ::2] = 0
        rows[:, 1::2] *= 20
    (usage,) = layers_usage(inspect_model(layer, x))
    assert usage.leaving == pytest.approx(sum(1 for d in range(rows.shape[1]) if d % 2) / rows.shape[1])
    torch.testing.assert_close(usage.temperature.max(), torch.ones((), dtype=torch.float64))
    assert (usage.kl_of_channels.view(2, -1)[:, ::2] < LEAVES).all()


def test_the_loss_of_a_long_text_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = FEMForCausalLM(FEMConfig(vocab_size=17, hidden_size=22, num_hidden_layers=1, num_attention_heads=2)).eval()
    tokens = torch.randint(17, (24,))
    monkeypatch.setattr(journal, "SECONDS_BETWEEN_LINES", 0.0)
    found = loss(model, tokens.tolist(), 7)
    assert "21/23 tokens of the text" in capsys.readouterr().err
    pieces = [(tokens[start : start + 7], tokens[start + 1 : start + 8]) for start in (0, 7, 14, 21)]
    with torch.no_grad():
        own = [torch.log_softmax(model(x[: len(y)][None]).logits[0].double(), -1)[range(len(y)), y] for x, y in pieces]
    assert found == pytest.approx(-float(torch.cat(own).mean()), rel=1e-6)
