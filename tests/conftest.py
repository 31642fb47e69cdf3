"""Settings of all tests."""

import gc
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator

import pytest
import torch
from hypothesis import settings
from lm_text import texts, write_lines

# What these assert is told as in the tests themselves.
pytest.register_assert_rewrite("contract", "matrix")

# Before triton is imported: its kernels run on CPU tensors, statement by statement; the other is a warning less.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

# The tests run two processes side by side; threads would only make them wait for each other.
torch.set_num_threads(1)

# Examples are a function of the test, so a failure is there again at the next run; times depend on the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wheel, site and notebooks come last: they are slow, and say nothing that an earlier failure does not."""
    items.sort(key=lambda item: item.get_closest_marker("delivery") is not None)


@pytest.fixture(scope="session", autouse=True)
def little_garbage() -> Iterator[None]:
    """Garbage is not looked for among all that pytest and the packages hold, which takes half a second each time.

    Benchmarks look before every sample, and would then let Python look through all again.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()  # what is left at the end would otherwise be called a leak


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs are carried out in this process."""
    from femixer.training import jobs

    monkeypatch.setattr(jobs, "local", lambda assignments, _: (jobs.attempt(each) for each in assignments))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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


BACKEND_NAMES = ("plain", "numba", "triton")


def _named(test: str, names: Collection[str]) -> set[str]:
    """The names among the parameters of a test, [softmax-CLTG] for example; tests/gpu is all Triton's."""
    parameters = test.partition("[")[2]
    found = set()
    for name in sorted(names, key=len, reverse=True):  # shorter ones are parts of longer ones
        if re.search(rf"(?<![a-z]){name}(?![a-z])", parameters):
            found.add(name)
            parameters = parameters.replace(name, "")
    return found | ({"triton"} & set(names) if "/gpu/" in test else set())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Properties held per prior and per backend: what a change to one of them has to keep."""
    from femixer.priors import PRIORS

    passed = [report.nodeid for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    passed = [test for test in passed if "test_architecture.py" not in test]  # names of files are no properties
    for what, names in (("prior", PRIORS), ("backend", BACKEND_NAMES)):
        counts = Counter(name for test in passed for name in _named(test, names))
        if counts:
            terminalreporter.write_line(f"properties per {what}: " + ", ".join(f"{n} {counts[n]}" for n in names))
