"""Models that were saved by an earlier version load, and say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from femixer.models import FEMForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("prior", ["softmax", "gla", "mamba"])
def test_a_saved_model_gives_the_logits_it_gave_when_it_was_saved(prior: str):
    where = FIXTURES / f"checkpoint-{prior}"
    model, missing = FEMForCausalLM.from_pretrained(where, output_loading_info=True)
    assert not any(missing.values()), missing
    saved = load_file(where / "model.safetensors")
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {n: t.shape for n, t in saved.items()}
    expected = load_file(where / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("prior", ["softmax", "gla", "mamba"])
def test_a_saved_model_decodes_to_the_same_logits(prior: str):
    where = FIXTURES / f"checkpoint-{prior}"
    model, expected = FEMForCausalLM.from_pretrained(where), load_file(where / "expected.safetensors")
    cache, logits = None, []
    with torch.no_grad():
        for ids in expected["input_ids"].split([5] + [1] * 8, 1):
            output = model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected["logits"], atol=1e-5, rtol=0)
