"""`femixer lm tokenizer`: train a byte-level BPE on the training part of a corpus."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from femixer.options import check, parse
from femixer.tasks.lm.corpus import Corpus
from femixer.tasks.lm.prepare import CorpusOptions
from femixer.tasks.lm.tokenizer import BYTES, train_bpe, vocabulary_size
from femixer.training import atomic


@dataclass(frozen=True)
class Command:
    """Train a tokenizer (byte-level BPE) on text, and save it as a transformers tokenizer.

    It reads the training part only: what is held out from training is held out here too.
    """

    out: Path
    """Folder for the tokenizer; it must not exist yet."""
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    vocab_size: int = 8192
    """Tokens: 256 bytes, the end of a text, and the merges."""
    megabytes: int = 1000
    """Stop reading after this much text."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "lm tokenizer")
    free = not command.out.exists() or (command.out.is_dir() and not any(command.out.iterdir()))
    check(free, "out", str(command.out), "a folder that does not exist yet")
    check(str(command.out) != BYTES, "out", BYTES, "another name: 'bytes' is the built-in tokenizer")
    check(command.megabytes > 0, "megabytes", command.megabytes, "a whole number above 0")
    reading = Reading(command.corpus.corpus(), command.megabytes * 10**6)
    tokenizer = train_bpe(reading, command.vocab_size, progress=sys.stderr.isatty())
    if not reading.bytes:
        raise ValueError(f"data={reading.corpus.name!r} holds no text to train on")
    command.out.parent.mkdir(parents=True, exist_ok=True)
    if command.out.exists():
        command.out.rmdir()
    with atomic.replacing(command.out) as partial:
        tokenizer.save_pretrained(partial)
    size = vocabulary_size(tokenizer)
    fewer = "" if size == command.vocab_size else f" (not {command.vocab_size:,}: the text has no more to merge)"
    print(f"{command.out}/: {size:,} tokens{fewer}, from {reading.documents:,} documents, {reading.bytes:,} bytes")
    return 0


class Reading:
    """The training texts up to a number of bytes, counted as they are read."""

    def __init__(self, corpus: Corpus, limit: int) -> None:
        self.corpus, self.limit = corpus, limit
        self.bytes = self.documents = 0

    def __iter__(self) -> Iterator[str]:
        for document in self.corpus.documents():
            self.bytes += len(document.text.encode())
            self.documents += document.begins
            yield document.text
            if self.bytes >= self.limit:
                return
