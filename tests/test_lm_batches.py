"""Tokens: tokenizers give back any text, and a batch of tokens is a function of its step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_text import everything, texts, write_lines

from femixer.tasks.lm.data.building import prepare
from femixer.tasks.lm.data.corpus import open_corpus
from femixer.tasks.lm.data.shards import IGNORED, Batches, Validation, permuted
from femixer.tasks.lm.data.tokenizer import END_OF_TEXT, encoder, identity, load_tokenizer, train_bpe
from femixer.training import Part

# Tokenizers


@given(text=st.text() | st.sampled_from([END_OF_TEXT, f"a{END_OF_TEXT}b", " a  b ", "\r\n\x00\ufeff", "n't , ."]))
def test_bytes_give_back_any_text(bytes_tokenizer, text):
    ids = bytes_tokenizer.encode(text)
    assert bytes_tokenizer.decode(ids) == text
    if END_OF_TEXT not in text:
        assert ids == [*text.encode()]


def test_bytes_have_an_end_of_text_and_nothing_else(bytes_tokenizer):
    assert len(bytes_tokenizer) == 257
    assert bytes_tokenizer.encode(END_OF_TEXT) == [256] == [bytes_tokenizer.eos_token_id]


@given(text=st.text() | st.sampled_from([END_OF_TEXT, "  größer  😀\n"]))
def test_bpe_gives_back_any_text_also_what_it_was_not_trained_on(bpe_folder, text):
    tokenizer = load_tokenizer(bpe_folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_is_reproducible_smaller_than_bytes_and_of_the_size_asked_for(bpe_folder):
    tokenizer, again = load_tokenizer(bpe_folder), train_bpe(texts(211), 331)
    assert len(tokenizer) == 331
    assert identity(tokenizer) == identity(again) != identity(train_bpe(texts(211, seed=1), 331))
    text = texts(1)[0]
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_shards_are_encoded_as_the_tokenizer_does_but_a_text_cannot_hold_special_tokens(
    tmp_path, bytes_tokenizer, bpe_folder, kind
):
    tokenizer = bytes_tokenizer if kind == "bytes" else load_tokenizer(bpe_folder)
    tokenizer.save_pretrained(tmp_path)
    many = [*texts(7), f"a {END_OF_TEXT} b"]
    ids = encoder(tmp_path, plain_bytes=kind == "bytes")(many)
    assert [one.tolist() for one in ids] == tokenizer(many, split_special_tokens=True)["input_ids"]
    assert tokenizer.eos_token_id not in ids[-1]


# Batches


@pytest.fixture
def shards(tmp_path, lines, bytes_tokenizer):
    return prepare(open_corpus([lines], part_bytes=700), bytes_tokenizer, tmp_path / "shards", workers=1)


@given(count=st.integers(1, 1500), key=st.integers(0, 2**64 - 1))
def test_order_is_a_permutation(count, key):
    assert sorted(permuted(np.arange(count), count, key)) == [*range(count)]


def test_orders_differ_and_look_random():
    orders = [permuted(np.arange(1009), 1009, key) for key in range(50)]
    assert len({tuple(order) for order in orders}) == 50
    steps = np.abs(np.diff(orders, axis=1))
    assert abs(steps.mean() / (1009 / 3) - 1) < 0.02  # the mean distance of two numbers drawn at random
    places = np.array(orders)[:, 500]
    assert abs(places.mean() / 504 - 1) < 0.25 and len({*places.tolist()}) > 45
    assert permuted(np.array([10**11]), 2 * 10**11, 0).item() < 2 * 10**11


def test_every_token_is_a_target_once_per_epoch_in_a_new_order(shards):
    context, batch = 19, 7
    stream = Batches(shards, context, batch, seed=3)
    tokens, _ = everything(shards.train)
    seen, taken = [], set()
    steps = -(-4 * stream.windows // batch)
    rows = torch.cat([torch.cat([b.inputs, b.targets[:, -1:]], 1) for b in map(stream, range(steps))]).numpy()
    for epoch in range(4):
        mine = rows[epoch * stream.windows : (epoch + 1) * stream.windows]
        # Windows tile the stream from one of the few shifts that fit; find it by the multiset of windows.
        shifts = [
            shift
            for shift in range(len(tokens) - stream.windows * context)
            if sorted(map(tuple, mine.tolist())) == sorted(window(tokens, shift, context, stream.windows))
        ]
        assert len(shifts) == 1
        taken.update(shifts)
        seen.append(mine.tolist())
    assert seen[0] != seen[1] and sorted(seen[0]) != seen[0]
    assert 0 < len(tokens) - 1 - stream.windows * context < context and len(taken) > 1  # others are left over
    assert stream.epoch(steps) >= 4 and stream.tokens == context * batch


def window(tokens, shift, context, count):
    return [tuple(tokens[shift + n * context : shift + (n + 1) * context + 1].tolist()) for n in range(count)]


def test_batch_is_a_function_of_seed_and_step(shards):
    stream, again, other = (Batches(shards, 13, 6, seed) for seed in (0, 0, 1))
    for step in (5, 0, 10**12):
        assert all(map(torch.equal, stream(step), again(step)))
    assert not torch.equal(stream(5).inputs, stream(6).inputs)
    assert not torch.equal(stream(5).inputs, other(5).inputs)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_processes_share_out_the_same_batch(shards, world):
    stream = Batches(shards, 13, 6)
    validation = Validation(shards, 13, 6)
    parts = [Part(rank, world) for rank in range(world)]
    whole = [stream(stream.windows // 6), *validation.batches()]  # the first one spans two epochs
    ranks = [[stream(stream.windows // 6, part), *validation.batches(part)] for part in parts]
    for index, batch in enumerate(whole):
        for field, tensor in enumerate(batch):
            assert tensor.dtype == torch.int64 and tensor.shape == (6, 13)
            assert torch.equal(torch.cat([mine[index][field] for mine in ranks]), tensor)


def test_segments_change_exactly_where_documents_begin(shards):
    batch = Batches(shards, 53, 11)(0)
    changes = batch.segments.diff(dim=1) == 1
    assert torch.equal(changes, batch.inputs[:, 1:] == shards.start_token)
    assert changes.sum() > 5
    # The end of a document is the model's to predict, and so is its first token; nothing is left out.
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])


def test_start_of_the_next_document_is_no_target_where_documents_end_otherwise(tmp_path, two_ends_folder):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in ("a b", "c", "a b c")])
    shards = prepare(open_corpus([path], [path]), load_tokenizer(two_ends_folder), tmp_path / "shards")
    (batch,) = Validation(shards, 13, 1).batches()
    assert batch.inputs.tolist() == [[1, 3, 4, 2, 1, 5, 2, 1, 3, 4, 5, 2, 2]]
    assert batch.targets.tolist() == [[3, 4, 2, IGNORED, 5, 2, IGNORED, 3, 4, 5, 2, IGNORED, IGNORED]]
    assert batch.segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1]]


@pytest.mark.parametrize(("context", "batch"), [(13, 5), (7, 11), (10**4, 3)])
def test_validation_predicts_every_token_once_in_order(shards, context, batch):
    validation = Validation(shards, context, batch)
    batches = [*validation.batches()]
    assert len(batches) == len(validation)
    targets = torch.cat([one.targets for one in batches]).flatten()
    tokens, _ = everything(shards.validation)
    assert targets[targets != IGNORED].tolist() == tokens[1:].tolist()
    for one in batches:
        assert torch.equal(one.segments == -1, one.targets == IGNORED)
    assert validation.bytes == shards.validation.bytes


def test_validation_may_stop_early(shards):
    validation = Validation(shards, 13, 5, windows=7)
    assert sum((one.targets != IGNORED).sum().item() for one in validation.batches()) == 7 * 13
    assert validation.bytes == pytest.approx(shards.validation.bytes * 91 / (shards.validation.tokens - 1))


def test_wrong_sizes_are_named(shards):
    tokens = shards.train.tokens
    with pytest.raises(
        ValueError, match=rf"has {tokens} tokens, too few .* context={tokens} \(which needs {tokens + 1}"
    ):
        Batches(shards, tokens, 1)
    assert Batches(shards, tokens - 1, 1)(3).targets.shape == (1, tokens - 1)
    with pytest.raises(ValueError, match="batch=6 is not allowed; choose at least one row for each of 7"):
        Batches(shards, 13, 6)(0, Part(1, 7))
    for wrong in ({"context": 0}, {"batch": 0}):
        with pytest.raises(ValueError, match="is not allowed"):
            Batches(shards, **{"context": 3, "batch": 2, **wrong})
