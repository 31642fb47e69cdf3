"""A state that was saved goes on in another process, with the weights that made it and with no others.

`python test_saved_states.py FOLDER` is that process.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import MASK, _variants, stir, tokens
from torch import nn

from femixer import FreeEnergyMixer
from femixer.baselines import BASELINES
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.priors import PRIORS

READ = 13


def mixers() -> dict[str, nn.Module]:
    """Every variant of every prior and every baseline, with the same weights in every process."""
    torch.manual_seed(5)
    found: dict[str, nn.Module] = {f"{v.prior} {v.name}": v.build() for prior in PRIORS for v in _variants(prior)}
    return found | {f"baseline {n}": stir(kind(24, 4, dtype=torch.float64)) for n, kind in BASELINES.items()}


def model() -> Any:
    torch.manual_seed(6)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "vocab_size": 61}
    return FEMForCausalLM(FEMConfig(**sizes, prior=["softmax", "gla", "mamba"])).eval()


def refusal(read: Any) -> str:
    with pytest.raises(ValueError, match="allowed") as caught:
        read()
    return str(caught.value)


@torch.no_grad()
def go_on(folder: Path) -> None:
    """Read the rest with every state, and try each with other weights too."""
    saved = torch.load(folder / "saved.pt", weights_only=True)
    x, found = tokens(batch=len(MASK))[:, READ:], {}
    for name, mixer in mixers().items():
        state = saved[name]
        y, after = mixer(x, mask=MASK[:, READ:], state=state, return_state=True)
        again = mixer(x, mask=MASK[:, READ:], state=state)  # a state is a value
        mixer.out_proj.weight.data.view(-1)[-1] += 1e-3
        found[name] = (y, torch.equal(y, again), after.owner, refusal(lambda m=mixer, s=state: m(x, state=s)))
    lm, ids = model(), torch.arange(2, 9)[None]
    cache = saved["cache"]
    found["cache"] = lm(ids, past_key_values=copy.deepcopy(cache)).logits
    lm.model.layers[1].mlp.down_proj.weight.data.view(-1)[0] += 1e-3  # no mixer's: their states alone would not tell
    found["other model"] = refusal(lambda: lm(ids, past_key_values=copy.deepcopy(cache)))
    torch.save(found, folder / "found.pt")


@torch.no_grad()
def test_saved_states_go_on_in_another_process_with_the_same_weights_only(tmp_path: Path) -> None:
    here, whole, saved = mixers(), {}, {}
    for name, mixer in here.items():
        whole[name] = mixer(tokens(batch=len(MASK)), mask=MASK)
        saved[name] = mixer(tokens(batch=len(MASK))[:, :READ], mask=MASK[:, :READ], return_state=True)[1]
    lm, ids = model(), torch.arange(1, 9)[None]
    expected = lm(ids).logits[:, 1:]
    saved["cache"] = lm(ids[:, :1], use_cache=True).past_key_values
    torch.save(saved, tmp_path / "saved.pt")
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # helpers of the tests too
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, timeout=120, env={**os.environ, **paths})
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert torch.allclose(found.pop("cache"), expected, atol=1e-5)
    assert "past_key_values was saved with other weights" in found.pop("other model")
    assert found.keys() == here.keys()
    for name, (y, same, owner, refused) in found.items():
        assert torch.allclose(y, whole[name][:, READ:], rtol=1e-9, atol=1e-10), name
        assert same and isinstance(owner, int), name
        assert refused == (
            "state was saved with other weights or settings; allowed is one that the same weights made"
        ), name


def stored(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True, **options)


def test_other_settings_with_the_same_weights_are_refused_and_a_copy_accepts() -> None:
    x = tokens()
    made = stir(FreeEnergyMixer(24, 3, "softmax", parts="LT", dtype=torch.float64))
    state = stored(made(x, return_state=True)[1])
    assert torch.equal(copy.deepcopy(made)(x, state=state), made(x, state=state))
    for options, says in (
        ({"window": 5}, "other weights or settings"),
        ({"rope": False}, "saved"),
        ({"heads": 2}, "saved by FreeEnergyMixer(dim=24, heads=3"),
        ({"prior": "linear"}, "prior='softmax'"),
    ):
        other = FreeEnergyMixer(**{"dim": 24, "heads": 3, "parts": "LT", "dtype": torch.float64, **options})
        if [p.shape for p in other.parameters()] == [p.shape for p in made.parameters()]:
            other.load_state_dict(made.state_dict())
        assert says in refusal(lambda m=other: m(x, state=state))


def test_a_saved_state_holds_no_more_than_itself() -> None:
    """Not the room behind growing tensors, not the batch that it was cut from, no graph."""
    mixer = stir(BASELINES["attention"](24, 3, dtype=torch.float64))
    _, state = mixer(tokens(batch=len(MASK)), return_state=True)
    with torch.no_grad():
        _, longer = mixer(tokens(batch=len(MASK))[:, :1], state=state, return_state=True)
    file = io.BytesIO()
    torch.save(longer, file)
    keys = longer.prior.keys
    assert keys.buffer.shape[2] > keys.length
    assert len(file.getvalue()) < 2 * keys.tensor.numel() * 8 + 5000
    assert not stored(state).prior.keys.tensor.requires_grad
    assert stored(longer).prior.keys.tensor.equal(keys.tensor)


def test_a_state_cannot_be_saved_without_its_mixer_nor_loaded_to_another_kind_of_device() -> None:
    mixer = stir(BASELINES["gla"](24, 3, dtype=torch.float64))
    _, state = mixer(tokens(batch=len(MASK)), return_state=True)
    with pytest.raises(ValueError, match="saved on cpu; loading it to meta is not possible"):
        stored(state, map_location="meta")
    del mixer
    with pytest.raises(ValueError, match="the mixer that made this state is gone"):
        stored(state)


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
