"""Packed documents, as transformers' own collator hands them to a model, are read each alone."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from femixer.models import FEMConfig, FEMForCausalLM

PRIORS = ("softmax", "linear", "gla", "aft", "ssm", "mamba")
LENGTHS = (5, 1, 9, 3)


def build(prior: str = "softmax") -> FEMForCausalLM:
    torch.manual_seed(0)
    model = FEMForCausalLM(
        FEMConfig(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, prior=prior)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 31, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("form", [{}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}], ids=str)
def test_what_the_flattening_collator_packs_is_read_document_by_document(prior, form, documents):
    model = build(prior)
    batch = DataCollatorWithFlattening(return_tensors="pt", **form)([{"input_ids": d} for d in documents])
    outputs = model(**batch)
    alone = [model(torch.tensor([d]), labels=torch.tensor([d])) for d in documents]
    torch.testing.assert_close(outputs.logits, torch.cat([a.logits for a in alone], 1), rtol=0, atol=2e-5)
    scored = [len(d) - 1 for d in documents]
    together = sum(a.loss.item() * n for a, n in zip(alone, scored, strict=True) if n) / sum(scored)
    assert outputs.loss.item() == pytest.approx(together, abs=1e-5)


def test_labels_that_were_shifted_by_the_caller_are_scored_as_they_are():
    model, ids = build(), torch.randint(1, 31, (2, 7))
    after = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    expected = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, shift_labels=after).loss, expected)
    torch.testing.assert_close(model(ids, labels=ids.flip(1), shift_labels=after).loss, expected)


def test_positions_of_one_document_change_nothing_and_other_positions_are_refused():
    model, ids = build(), torch.randint(1, 31, (2, 7))
    plain = model(ids).logits
    assert torch.equal(model(ids, position_ids=torch.arange(7)[None]).logits, plain)
    for wrong in (torch.arange(7)[None] + 1, torch.tensor([[0, 1, 2, 5, 6, 7, 8]]), torch.zeros(2, 3).long()):
        with pytest.raises(ValueError, match="position_ids"):
            model(ids, position_ids=wrong)


def test_contradicting_documents_are_refused():
    model, ids = build(), torch.randint(1, 31, (1, 6))
    starts = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="begin documents at different tokens"):
        model(ids, position_ids=starts, segments=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="one row"):
        model(ids.expand(2, -1), cu_seq_lens_q=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize("name", ["output_attentions", "token_type_ids", "head_mask", "encoder_hidden_states"])
def test_an_argument_that_would_be_ignored_is_an_error(name):
    model, ids = build(), torch.randint(1, 31, (1, 6))
    with pytest.raises(TypeError, match=name):
        model(ids, **{name: True if name.startswith("output") else torch.ones(1, 6)})
    model(ids, **{name: None})


def test_lengths_that_do_not_rise_or_come_alone_are_refused():
    model, ids = build(), torch.randint(1, 31, (1, 6))
    with pytest.raises(ValueError, match="must rise"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 2, 6]))
    with pytest.raises(ValueError, match="max_length_q was given without cu_seq_lens_q"):
        model(ids, max_length_q=3)
