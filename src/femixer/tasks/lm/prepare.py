"""`femixer lm data`: tokenize a corpus into shards. Its options are those of every command that reads text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.options import check, parse
from femixer.tasks.lm.building import prepare
from femixer.tasks.lm.corpus import SPLITS, STANDARD_LIBRARY, Corpus, open_corpus
from femixer.tasks.lm.shards import Shards, incomplete, open_shards, read_index
from femixer.tasks.lm.tokenizer import BYTES, identity, load_tokenizer


@dataclass(frozen=True)
class CorpusOptions:
    """Which text."""

    data: tuple[str, ...] = ()
    """Text files, .jsonl (also .gz), .parquet, folders of them, datasets:NAME[@REVISION][:CONFIG[:SPLIT]] (e.g.
    datasets:HuggingFaceFW/fineweb-edu:sample-10BT), or python: the standard library's sources on this machine, which is
    the default."""
    validation: tuple[str, ...] = ()
    """Sources to validate on, instead of a part of --data."""
    validation_fraction: float = 0.05
    """Share of --data that is held out when --validation is not given: documents chosen by hash, or the end of a single
    text file."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""

    def corpus(self) -> Corpus:
        return open_corpus(self.data or (STANDARD_LIBRARY,), self.validation, self.validation_fraction, self.text_field)


@dataclass(frozen=True)
class DataOptions(CorpusOptions):
    """Which text, as which tokens, kept where."""

    tokenizer: str | None = None
    """bytes (the default), a folder with a saved tokenizer, or the name of a transformers tokenizer."""
    max_tokens: int | None = None
    """Stop reading once there are this many training tokens."""
    shards: Path | None = None
    """Folder of the tokens, by default one in results/data. Without --data, what it holds is used as it is."""
    workers: int | None = None
    """Processes that tokenize, by default as many as there are cores and work for them."""

    def prepare(self, overwrite: bool = False) -> Shards:
        """Open the tokens, after making what is missing."""
        if self.shards is not None and not self.data and not overwrite:
            index = read_index(self.shards)
            if index is not None and incomplete(self.shards, index) is None:
                return self._as_they_are(self.shards)
        tokenizer = load_tokenizer(self.tokenizer or BYTES)
        return prepare(self.corpus(), tokenizer, self.shards, self.max_tokens, self.workers, overwrite)

    def _as_they_are(self, folder: Path) -> Shards:
        shards = open_shards(folder)
        if self.tokenizer is not None:
            same = identity(load_tokenizer(self.tokenizer)) == identity(load_tokenizer(shards.tokenizer_folder))
            check(same, "tokenizer", self.tokenizer, f"the one of the tokens in {folder}, or leave it out")
        return shards


@dataclass(frozen=True)
class Command:
    """Tokenize a corpus once, for any number of trainings.

    What is finished stays when the command is stopped, and the same command goes on from there.
    """

    data: DataOptions
    overwrite: bool = False
    """Delete the tokens in --shards and make them anew."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "lm data")
    check(not command.overwrite or command.data.shards is not None, "overwrite", True, "--shards too, to say what")
    try:
        shards = command.data.prepare(command.overwrite)
    except KeyboardInterrupt:
        print("interrupted; finished parts are kept, and the same command goes on from there", file=sys.stderr)
        return 130
    print(table(shards))
    print(f"Tokens are in {shards.folder}/ (vocabulary {shards.vocabulary})")
    return 0


def table(shards: Shards) -> str:
    lines = ["| split | tokens | documents | bytes of text | bytes per token |", "|---|---:|---:|---:|---:|"]
    for split in (getattr(shards, name) for name in SPLITS):
        ratio = split.bytes / split.tokens
        lines.append(f"| {split.name} | {split.tokens:,} | {split.documents:,} | {split.bytes:,} | {ratio:.3f} |")
    return "\n".join(lines)
