"""Text as tokens: which corpus, by which tokenizer, kept where. The options of every command that reads text."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from femixer.options import Count, check, parse
from femixer.reporting import Table, as_markdown
from femixer.tasks.lm.data.building import prepare
from femixer.tasks.lm.data.corpus import STANDARD_LIBRARY, Corpus, open_corpus
from femixer.tasks.lm.data.shards import Shards, incomplete, open_shards, read_index
from femixer.tasks.lm.data.tokenizer import BYTES, identity, load_tokenizer, train_bpe, vocabulary_size
from femixer.training import atomic, distributed

DEFAULT_TEXT = "python, the standard library's sources on this machine (no --data was given)"


@dataclass(frozen=True)
class CorpusOptions:
    """Which text."""

    data: tuple[str, ...] = ()
    """Text files, .jsonl (also .gz), .parquet, or folders of them;
    datasets:NAME[@REVISION][:CONFIG[:SPLIT]], e.g. datasets:HuggingFaceFW/fineweb-edu:sample-10BT;
    python, the default: the standard library's sources on this machine."""
    validation: tuple[str, ...] = ()
    """Sources to validate on, instead of a part of --data."""
    validation_fraction: float = 0.05
    """Share of --data that is held out without --validation: documents chosen by hash, or the end of a single file."""
    text_field: str = "text"
    """Field of JSON lines, parquet and datasets that holds the text."""

    def corpus(self) -> Corpus:
        return open_corpus(self.data or (STANDARD_LIBRARY,), self.validation, self.validation_fraction, self.text_field)


@dataclass(frozen=True)
class DataOptions(CorpusOptions):
    """Text, tokenizer and folder of the tokens."""

    tokenizer: str | None = None
    """bytes (the default), a folder with a saved tokenizer, or the name of a transformers tokenizer."""
    max_tokens: int | None = None
    """Stop reading once there are this many training tokens."""
    shards: Path | None = None
    """Folder of the tokens, by default one in results/data. Without --data, what it holds is used as it is."""
    workers: int | None = None
    """Processes that tokenize, by default as many as there are cores and work for them."""

    def tokens(self, make: bool = False, overwrite: bool = False) -> Shards:
        """The tokens to read, made first if a text is named for them or nothing is named at all.

        make: also where --shards alone is named and holds none. overwrite: also where it does.
        """
        if self.shards is not None and not self.data and not overwrite:
            index = read_index(self.shards)
            why = "is no folder of tokens" if index is None else incomplete(self.shards, index)
            if why is None:
                shards, wanted = open_shards(self.shards), self.tokenizer
                same = wanted is None or identity(load_tokenizer(wanted)) == identity(shards.tokenizer)
                check(same, "tokenizer", wanted, f"the one of the tokens in {self.shards}, or leave it out")
                return shards
            allowed = "a folder that `femixer lm data` has finished, or give --data too, to say of what text to make it"
            check(make, "shards", str(self.shards), allowed, f"cannot be read: it {why.removeprefix('it ')}")
        if not self.data:
            distributed.say(f"text: {DEFAULT_TEXT}")
        tokenizer = load_tokenizer(self.tokenizer or BYTES)
        return prepare(self.corpus(), tokenizer, self.shards, self.max_tokens, self.workers, overwrite)

    def described(self) -> str:
        """Which text, in words."""
        if self.data:
            return ", ".join(self.data)
        return DEFAULT_TEXT if self.shards is None else f"the tokens in {self.shards}"


@dataclass(frozen=True)
class Prepare:
    """Tokenize a corpus once, for any number of trainings.

    What is finished stays when the command is stopped, and the same command goes on from there.
    """

    data: DataOptions
    overwrite: bool = False
    """Make the tokens in --shards anew; the old ones are replaced when the new ones are complete."""


def prepare_data(args: Sequence[str]) -> int:
    command = parse(Prepare, args, "lm data")
    check(not command.overwrite or command.data.shards is not None, "overwrite", True, "--shards too, to say what")
    try:
        shards = command.data.tokens(make=True, overwrite=command.overwrite)
    except KeyboardInterrupt:
        distributed.say("interrupted; finished parts are kept, and the same command goes on from there")
        return 130
    print(as_markdown(table(shards)))
    print(f"Tokens are in {shards.folder}/ (vocabulary {shards.vocabulary})")
    return 0


def table(shards: Shards) -> Table:
    rows = [
        [each.name, f"{each.tokens:,}", f"{each.documents:,}", f"{each.bytes:,}", f"{each.bytes / each.tokens:.3f}"]
        for each in (shards.train, shards.validation)
    ]
    return Table.of(("split", "tokens", "documents", "bytes of text", "bytes per token"), rows)


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a tokenizer (byte-level BPE) on text, and save it as a transformers tokenizer.

    It reads the training part only: what is held out from training is held out here too.
    """

    out: Path
    """Folder for the tokenizer; it must not exist yet."""
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    vocab_size: int = 8192
    """Tokens: 256 bytes, the end of a text, and the merges."""
    megabytes: Count = 1000
    """Stop reading after this much text."""


def train_tokenizer(args: Sequence[str]) -> int:
    command = parse(TrainTokenizer, args, "lm tokenizer")
    free = not command.out.exists() or (command.out.is_dir() and not any(command.out.iterdir()))
    check(free, "out", str(command.out), "a folder that does not exist yet")
    check(str(command.out) != BYTES, "out", BYTES, "another name: 'bytes' is the built-in tokenizer")
    corpus, documents, size = command.corpus.corpus(), 0, 0

    def texts() -> Iterator[str]:
        nonlocal documents, size
        for document in corpus.documents():
            documents, size = documents + document.begins, size + len(document.text.encode())
            yield document.text
            if size >= command.megabytes * 10**6:
                return

    tokenizer = train_bpe(texts(), command.vocab_size, progress=sys.stderr.isatty())
    if not size:
        raise ValueError(f"data={corpus.name!r} holds no text to train on")
    command.out.parent.mkdir(parents=True, exist_ok=True)
    if command.out.exists():
        command.out.rmdir()
    with atomic.replacing(command.out) as partial:
        tokenizer.save_pretrained(partial)
    count = vocabulary_size(tokenizer)
    fewer = "" if count == command.vocab_size else f" (not {command.vocab_size:,}: the text has no more to merge)"
    print(f"{command.out}/: {count:,} tokens{fewer}, from {documents:,} documents, {size:,} bytes")
    return 0
