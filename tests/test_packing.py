"""Packed documents, as transformers' own collator hands them to a model, are read each alone."""

from itertools import chain

import pytest
import torch
from small_models import stirred, text
from transformers import DataCollatorWithFlattening

from femixer.models import FEMForCausalLM

PRIORS = ("softmax", "linear", "gla", "aft", "ssm", "mamba")
LENGTHS = (5, 1, 9, 3)


def build(prior: str = "softmax") -> FEMForCausalLM:
    return stirred(text(prior=prior))


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


@pytest.mark.parametrize(
    "fields",
    [{"mixer": "attention"}, {"mixer": ["fem", "attention"], "prior": "aft"}, {"prior": ["gla", "softmax"]}],
    ids=str,
)
def test_segments_of_any_number_are_documents_to_every_mixer(fields, documents):
    model, padding = stirred(text(**fields)), [3, 5]
    ids = torch.tensor([[*chain(*documents), *padding]])
    segments = torch.tensor([4, 0, 1, 7, -1]).repeat_interleave(torch.tensor([*LENGTHS, len(padding)]))[None]
    packed = model(ids, segments=segments, labels=ids)
    alone = [model(torch.tensor([d]), labels=torch.tensor([d])) for d in documents]
    expected = torch.cat([a.logits for a in alone], 1)
    torch.testing.assert_close(packed.logits[:, : -len(padding)], expected, rtol=1e-4, atol=2e-5)
    scored = [n - 1 for n in LENGTHS]
    together = sum(a.loss.item() * n for a, n in zip(alone, scored, strict=True) if n) / sum(scored)
    assert packed.loss.item() == pytest.approx(together, abs=1e-5)


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


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("cuts", [[9, 3], [5, 7], [7, 1, 1, 3], [3, 9]], ids=str)
def test_positions_of_packed_documents_say_the_same_with_a_cache(prior, cuts):
    """Wherever a row is cut: within a document, it goes on; where one begins, nothing is read of the last."""
    model, ids = build(prior), torch.randint(1, 31, (2, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    whole = model(ids, position_ids=positions, labels=ids)
    cache, logits = None, []
    for piece, place in zip(ids.split(cuts, 1), positions.split(cuts, 1), strict=True):
        out = model(piece, position_ids=place, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=0, atol=2e-5)


def test_generate_goes_on_with_the_last_of_packed_documents():
    model, ids = build(), torch.randint(1, 31, (1, 9))
    prompt = {"position_ids": torch.cat([torch.arange(5), torch.arange(4)])[None]}
    for given in (prompt, {}):
        cache = None
        if not given:  # the first document is read, and the second begins, before generate() sees the tokens
            cache = model(ids[:, :8], segments=torch.tensor([[3] * 5 + [7] * 3]), use_cache=True).past_key_values
        found = model.generate(
            ids, max_new_tokens=4, do_sample=False, past_key_values=cache, pad_token_id=0, eos_token_id=-1, **given
        )
        alone = model.generate(ids[:, 5:], max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
        assert found[0, 9:].tolist() == alone[0, 4:].tolist()


def test_labels_go_with_positions_after_a_cache():
    model, ids = build(), torch.randint(1, 31, (1, 12))
    cache = model(ids[:, :7], use_cache=True).past_key_values
    out = model(ids[:, 7:], labels=ids[:, 7:], position_ids=torch.arange(7, 12)[None], past_key_values=cache)
    wanted = torch.nn.functional.cross_entropy(model(ids).logits[0, 7:-1], ids[0, 8:])
    torch.testing.assert_close(out.loss, wanted, rtol=0, atol=1e-5)


def test_padding_of_packed_rows_is_not_scored():
    model, ids = build(), torch.randint(1, 31, (1, 8))
    segments, mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    inside = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    assert (
        model(ids, segments=segments, attention_mask=mask, labels=ids).loss
        == model(ids, segments=inside, labels=ids).loss
    )


@pytest.mark.parametrize("prior", PRIORS)
def test_positions_part_documents_that_only_padding_separates(prior):
    model, ids = build(prior), torch.randint(1, 31, (1, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    after = model(ids, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(after, model(ids[:, 4:]).logits, rtol=0, atol=2e-5)
