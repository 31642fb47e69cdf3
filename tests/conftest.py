"""Settings of all tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from lm_text import texts, write_lines

# The tests run two processes side by side; threads would only make them wait for each other.
torch.set_num_threads(1)

# Examples are a function of the test, so a failure is there again at the next run; times depend on the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def little_garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks collect garbage before every sample, which with all that pytest holds takes longer than the rest."""
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    unfreeze()


@pytest.fixture
def lines(tmp_path):
    """A JSON lines file of 97 texts."""
    return write_lines(tmp_path / "lines.jsonl", [{"text": text, "id": n} for n, text in enumerate(texts(97))])


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory):
    """As a user gets it: saved beside a model, loaded by AutoTokenizer."""
    from transformers import AutoTokenizer

    from femixer.tasks.lm.data.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("bytes")
    load_tokenizer("bytes").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    from femixer.tasks.lm.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(texts(211), 331).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def two_ends_folder(tmp_path_factory):
    """A tokenizer that begins and ends a document with different tokens, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return folder
