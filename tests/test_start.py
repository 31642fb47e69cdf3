"""How a mixer starts: as its prior's mean read, with gates that learn; and options of the temperature."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from matrix import noise

from femixer import FreeEnergyMixer
from femixer.cli import main
from femixer.gates import lam_logits
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.models.forecast import ForecastConfig
from femixer.models.vision import FEMVisionConfig
from femixer.priors import PRIORS

SIZES = (21, 3)
EVERY = [(prior, {}) for prior in PRIORS] + [("gla", {"decay": "channel"}), ("mamba", {"normalize": False})]
each = pytest.mark.parametrize(("prior", "options"), EVERY, ids=str)
SUBSETS = [
    parts
    for count in range(5)
    for parts in map("".join, itertools.combinations("CLTG", count))
    if "L" in parts or "T" not in parts
]


def mean_read(m: FreeEnergyMixer, x: torch.Tensor) -> torch.Tensor:
    """The layer without free energy and gates."""
    projected, layout = m.prepare(x)
    mean, _, _ = m.prior.read(projected.inputs, projected.v, None, layout, None, False)
    return m.out_proj(mean.flatten(-2))


@each
@pytest.mark.parametrize("bias", [True, False])
def test_a_mixer_starts_as_the_mean_read_of_its_prior(prior: str, options: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    x = noise(2, 23, SIZES[0])
    for parts in SUBSETS:
        if "L" in parts and "T" not in parts and options.get("normalize") is False:
            with pytest.raises(ValueError, match="normalize=False"):
                FreeEnergyMixer(*SIZES, prior, parts, start="prior", prior_options=options)
            continue
        m = FreeEnergyMixer(*SIZES, prior, parts, bias=bias, start="prior", prior_options=options, dtype=x.dtype)
        expected = mean_read(m, x)
        assert (m(x) - expected).norm() <= 1e-3 * expected.norm(), parts
        if "G" in parts:
            assert torch.allclose(m.inspect(x).gate, torch.ones((), dtype=x.dtype), rtol=2e-6)


@each
def test_everything_learns_from_the_first_two_steps(prior: str, options: dict[str, Any]) -> None:
    """Rows of maps that are zero because what they scale is zero have a gradient after the first step."""
    torch.manual_seed(1)
    m = FreeEnergyMixer(*SIZES, prior, start="prior", bias=False, prior_options=options, dtype=torch.float64)
    optimizer = torch.optim.Adam(m.parameters(), 1e-2)
    x, target = noise(5, 11, SIZES[0]), noise(5, 11, SIZES[0], seed=2)
    learned: dict[str, torch.Tensor] = {}
    for _ in range(2):
        optimizer.zero_grad()
        (m(x) - target).square().mean().backward()
        for name, parameter in m.named_parameters():
            rows = parameter.grad.reshape(len(parameter), -1).abs().amax(1) > 0
            learned[name] = learned.get(name, False) | rows
        optimizer.step()
    dead = [name for name, rows in learned.items() if not bool(rows.all())]
    assert not dead


@pytest.mark.parametrize("sign", [1, -1])
def test_lam_opens_where_the_free_energy_helps_and_stays_where_it_does_not(sign: int) -> None:
    """The target is the read of a free energy, or what lies on the other side of the mean."""
    torch.manual_seed(3)
    x = noise(5, 37, SIZES[0])
    m = FreeEnergyMixer(*SIZES, parts="LT", start="prior", dtype=x.dtype)
    torch.nn.init.normal_(m.value_proj.linear.weight[: 3 * m.widths.value].detach())
    read = m.inspect(x)
    mean, free = (m.out_proj(each.transpose(1, 2).flatten(-2)).detach() for each in (read.mean, read.free_energy))
    target = mean + sign * (free - mean) / 2
    optimizer = torch.optim.Adam([m.lam_odds], 2e-3)
    for _ in range(100):
        optimizer.zero_grad()
        (m(x) - target).square().mean().backward()
        optimizer.step()
    lam = m.inspect(x).lam
    assert (lam.mean() > 0.1) if sign > 0 else (lam.mean() < 0.03)


@pytest.mark.parametrize("odds", [0.0, -1e-3])
def test_odds_come_back_from_zero_and_below(odds: float) -> None:
    odds = torch.full((1, 1), odds, requires_grad=True)
    optimizer = torch.optim.Adam([odds], 1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        (lam_logits(torch.zeros(1, 1, 1, 1), odds).sigmoid() - 0.1).square().sum().backward()
        optimizer.step()
    assert lam_logits(torch.zeros(1, 1, 1, 1), odds).sigmoid().item() == pytest.approx(0.1, abs=0.01)


def test_the_paper_s_start_is_the_default() -> None:
    torch.manual_seed(2)
    m = FreeEnergyMixer(*SIZES, bias=False)
    assert m.lam_odds is None
    assert m.value_proj.linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert m.beta_max.mean().item() == pytest.approx(1.953, abs=1e-3)


@pytest.mark.parametrize("parts", ["L", "CLT"])
@pytest.mark.parametrize("prior", ["softmax", "gla", "mamba-interactive"])
def test_a_fixed_temperature_is_one(prior: str, parts: str) -> None:
    m = FreeEnergyMixer(*SIZES, prior, parts, temperature="fixed")
    assert "raw_beta" not in dict(m.named_parameters())
    assert torch.equal(m.beta_max, torch.ones(3, m.widths.value))
    x = noise(2, 11, SIZES[0], dtype=torch.float32)
    learned = FreeEnergyMixer(*SIZES, prior, parts)
    learned.load_state_dict(m.state_dict(), strict=False)
    torch.nn.init.constant_(learned.raw_beta, 0.541325 - 1.8)  # softplus of 0.541325 is 1
    torch.testing.assert_close(m(x), learned(x), rtol=1e-4, atol=1e-5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"start": "zero"}, "start='zero' is unknown; choose one of paper, prior"),
    ({"temperature": "cold"}, "temperature='cold' is unknown; choose one of learned, fixed"),
    ({"temperature": "fixed", "parts": "CG"}, "temperature='fixed' does not fit parts='CG'"),
    ({"temperature": "fixed", "parts": "L", "start": "prior"}, "start='prior' does not fit parts='L'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeEnergyMixer(*SIZES, **options)


def test_configurations_pass_the_options_on_and_keep_them(tmp_path: Path) -> None:
    asked = {
        "start": "prior",
        "readout": "posterior_mean",
        "mixer_temperature": "fixed",
        "budget": "balanced",
        "parts": "CLT",
    }
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = FEMConfig(vocab_size=11, **sizes, **asked)
    with pytest.raises(StrictDataclassError, match="start='prior' does not fit mixer='attention'; choose 'paper'"):
        FEMConfig(mixer="attention", start="prior")
    stacks = [config, FEMVisionConfig(**sizes, **asked).stack(), ForecastConfig(**sizes, **asked).stack()]
    assert all(getattr(stack, name) == value for stack in stacks for name, value in asked.items())
    model = FEMForCausalLM(config).eval()
    mixer = model.model.layers[0].mixer
    assert (mixer.start, mixer.readout, mixer.temperature) == ("prior", "posterior_mean", "fixed")
    assert mixer.widths.key == FreeEnergyMixer(24, 3, parts="CLT", budget="balanced").widths.key
    model.save_pretrained(tmp_path)
    ids = torch.arange(11)[None]
    assert torch.equal(FEMForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    old = json.loads((tmp_path / "config.json").read_text())
    assert {name: old[name] for name in asked} == asked
    # A configuration that was saved before there were such options.
    FEMForCausalLM(FEMConfig(vocab_size=11, **sizes)).save_pretrained(tmp_path)
    old = json.loads((tmp_path / "config.json").read_text())
    for name in ("start", "readout", "mixer_temperature"):
        del old[name]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert FEMForCausalLM.from_pretrained(tmp_path).config.start == "paper"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("lm train --mixer attention --start prior", "start='prior' is not allowed"),
        ("lm compare --models SMAttn GLA --temperature fixed", "temperature='fixed' is not allowed"),
        ("mad run --models SMAttn+C --readout posterior_mean", "readout='posterior_mean' is not allowed"),
        ("mad run --models FEM-AFT SMAttn --budget balanced", "budget='balanced' is not allowed"),
        ("vision train --model SMAttn --start prior", "start='prior' is not allowed"),
        ("forecast run --models DLinear --start prior", "start='prior' is not allowed"),
    ],
)
def test_commands_refuse_options_that_no_model_takes(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
