"""Tokenizing a corpus into shards: in parallel, part by part, and from where it was when something stopped it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from femixer.options import check, check_positive
from femixer.tasks.lm.data import tokenizer as tokenizers
from femixer.tasks.lm.data.corpus import SPLITS, TRAIN, VALIDATION, Corpus, Part
from femixer.tasks.lm.data.shards import (
    FORMAT,
    INDEX,
    PART,
    TOKENIZER,
    Counts,
    Shards,
    dtype_for,
    fingerprint_of,
    finished_part,
    incomplete,
    open_shards,
    part_name,
    read_index,
)
from femixer.tasks.lm.data.sources import PIECE, Document
from femixer.training import atomic, distributed
from femixer.training.distributed import carried_out, cores
from femixer.training.journal import counting
from femixer.training.results import differences

PartCounts = dict[str, Counts]


CACHE = Path("results/data")
"""Where tokens are kept when no folder is named: in CACHE/NAME-FINGERPRINT."""


def prepare(
    corpus: Corpus,
    tokenizer: Any,
    folder: str | Path | None = None,
    tokens: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> Shards:
    """The tokens of a corpus, made now or before.

    folder      where they are kept, by default a folder of their own in results/data. What it holds of the same
                corpus, tokenizer and options is used and completed; anything else is an error
    tokens      stop after the part with which training has this many tokens; by default take the whole corpus
    workers     processes, by default as many as there are cores to use and work to share
    overwrite   make them anew; those that the folder holds are replaced when the new ones are complete
    """
    check_positive(tokens=tokens, workers=workers)
    identity = {"corpus": corpus.identity, "tokenizer": tokenizers.identity(tokenizer), "tokens": tokens}
    fingerprint = fingerprint_of(identity)
    place = CACHE / f"{corpus.name[:60]}-{fingerprint}" if folder is None else Path(folder)
    check(not place.exists() or place.is_dir(), "shards", str(place), "a folder")
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):  # waits until no other process works there; one that dies leaves nothing locked
        if atomic.is_being_replaced(place):
            replace(place)
        if not (place / INDEX).exists():
            atomic.check_free("shards", place, ("lock", atomic.NEW))
        folder = replacement(place, fingerprint) if overwrite and (place / INDEX).exists() else place
        index = claim(folder, {"format": FORMAT, "fingerprint": fingerprint, "identity": identity})
        if incomplete(folder, index) is not None:
            tokenizer.save_pretrained(folder / TOKENIZER)
            job = Tokenization.of(folder, tokenizer)
            parts = tokenize(corpus, job, tokens, workers or processes(corpus, job))
            check_splits(corpus, parts)
            for rest in folder.glob("*" + atomic.PARTIAL):
                atomic.remove(rest)
            atomic.write(folder / INDEX, json.dumps({**index, "parts": parts}, indent=1) + "\n")
        if folder != place:
            replace(place)
        return open_shards(place)


def replacement(folder: Path, fingerprint: str) -> Path:
    """Where the tokens that shall replace those of the folder are made; the same ones that were begun are completed."""
    begun = folder / atomic.NEW
    with contextlib.suppress(ValueError):  # a damaged index is none
        held = read_index(begun)
        if held is not None and held["fingerprint"] == fingerprint:
            return begun
    return atomic.begin_replacement(folder)


def replace(folder: Path) -> None:
    """Let the tokens that were made to replace those of the folder take their place."""
    stay = ("lock", atomic.NEW, atomic.LEAVING, atomic.ENTERING, atomic.OLD)
    old = [path.name for path in folder.iterdir() if path.name not in stay]
    atomic.replace_content(folder, old, last=(INDEX,))


def claim(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """The index of the folder, which is for the same tokens or new."""
    held = read_index(folder)
    if held is None:
        atomic.write(folder / INDEX, json.dumps(index, indent=1) + "\n")
        return index
    was, now = ({**one["identity"]["corpus"], **one["identity"], "corpus": None} for one in (held, index))
    state = f"holds the tokens of other data ({differences(was, now)})"
    same = held["fingerprint"] == index["fingerprint"]
    check(same, "shards", str(folder), "another folder, or --overwrite, which makes them anew", state)
    return held


def processes(corpus: Corpus, job: Tokenization) -> int:
    """As many as can be kept busy: starting one takes seconds, in which this one has done some parts itself."""
    worthwhile = (1024 if job.plain_bytes else 16) << 20
    unknown_size = any(part.size == 0 for part in corpus.parts)
    return max(1, min(cores(), len(corpus.parts) if unknown_size else corpus.size // worthwhile))


def check_splits(corpus: Corpus, parts: Sequence[PartCounts]) -> None:
    """Both splits must have text."""
    documents = {name: sum(part[name]["documents"] for part in parts) for name in SPLITS}
    check(any(documents.values()), "data", corpus.name, "sources with some text in them")
    for name in SPLITS:
        if not documents[name]:
            told = f"with {sum(documents.values())} documents in all. Choose another validation_fraction"
            raise ValueError(f"the {name} split of data={corpus.name!r} is empty, {told}, or name validation sources")


def tokenize(corpus: Corpus, job: Tokenization, tokens: int | None, workers: int) -> list[PartCounts]:
    """The counts of all parts, or of as many as hold `tokens` training tokens; only what is missing is made."""
    done = {number: counts for number in range(len(corpus.parts)) if (counts := job.finished(number)) is not None}

    def enough() -> list[PartCounts] | None:
        """The finished parts from the first one on, once they suffice."""
        total, chosen = 0, []
        for number, part in enumerate(corpus.parts):
            if number not in done:
                return None
            chosen.append(done[number])
            total += done[number][TRAIN]["tokens"]
            if tokens is not None and total >= tokens and part.split != VALIDATION:
                break
        return chosen

    if (chosen := enough()) is not None:
        return chosen
    todo = [number for number in range(len(corpus.parts)) if number not in done]
    before = sum(counts[TRAIN]["tokens"] for counts in done.values())
    goal, total, began = "" if tokens is None else f" of {tokens:,}", before, time.monotonic()
    if done:
        distributed.say(f"{job.folder}: {len(done)} of {len(corpus.parts)} parts are there already")
    with counting(len(corpus.parts), "parts tokenized", done=len(done)) as told:
        try:
            for number, counts in finishing(job, corpus.parts, todo, min(workers, len(todo))):
                done[number] = counts
                total += counts[TRAIN]["tokens"]
                told(1, f"{total:,}{goal} tokens, {(total - before) / (time.monotonic() - began):,.0f}/s")
                if (chosen := enough()) is not None:
                    return chosen
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(job.folder).free >> 20
            full = f"no room for more tokens in {job.folder} ({os.strerror(error.errno)}, {free} MiB free)"
            kept = f"{len(done)} of {len(corpus.parts)} parts are finished and kept; make room and run the same again"
            raise OSError(f"{full}: {kept}") from error
    raise AssertionError("all parts are finished, so enough of them are")


def finishing(
    job: Tokenization, parts: Sequence[Part], todo: Iterable[int], workers: int
) -> Iterator[tuple[int, PartCounts]]:
    """Make the parts `todo`, and tell of each when it is finished. Closing this stops the work."""
    if workers == 1:
        for number in todo:
            yield number, job.make(number, parts[number])
        return
    tasks = [(job, number, parts[number]) for number in todo]
    with contextlib.closing(carried_out(work, tasks, workers)) as finished:
        for _, future in finished:
            if isinstance(error := future.exception(), BrokenProcessPool):
                raise RuntimeError(
                    "a worker process died: out of memory (choose fewer workers), or a script that starts this without "
                    'if __name__ == "__main__":'
                ) from error
            yield future.result()


def work(task: tuple[Tokenization, int, Part]) -> tuple[int, PartCounts]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parallelism is in the processes
    job, number, part = task
    return number, job.make(number, part)


@dataclass(frozen=True)
class Tokenization:
    """What every worker knows: where the parts go, and how text becomes tokens."""

    folder: Path
    start: int
    end: int
    dtype: np.dtype[Any]
    plain_bytes: bool

    @classmethod
    def of(cls, folder: Path, tokenizer: Any) -> Tokenization:
        dtype = dtype_for(tokenizers.vocabulary_size(tokenizer))
        return cls(folder, *tokenizers.start_and_end(tokenizer), dtype, tokenizers.is_bytes(tokenizer))

    def finished(self, number: int) -> PartCounts | None:
        """The counts of a part that is already there; one that is damaged is removed."""
        place = self.folder / part_name(number)
        counts = finished_part(place, self.dtype)
        if counts is None:
            atomic.remove(place)
        return counts

    def make(self, number: int, part: Part) -> PartCounts:
        """Tokenize one part. It is on the disk when this returns, and nothing of it when this fails."""
        encode = tokenizers.encoder(self.folder / TOKENIZER, self.plain_bytes)
        with atomic.replacing(self.folder / part_name(number)) as partial:
            partial.mkdir()
            writers = {name: Writer(partial / name, self) for name in SPLITS}
            try:
                for group in groups(part.documents()):
                    texts = encode([document.text for _, document in group])
                    for (split, document), ids in zip(group, texts, strict=True):
                        writers[split].add(document, ids)
                counts = {name: writer.counts() for name, writer in writers.items()}
            finally:
                for writer in writers.values():
                    writer.file.close()
            (partial / PART).write_text(json.dumps(counts) + "\n", encoding="utf-8")
        return counts


def groups(documents: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Enough documents at a time for a tokenizer to be fast, few enough for the memory."""
    group, size = [], 0
    for split, document in documents:
        group.append((split, document))
        size += len(document.text)
        if size >= PIECE or len(group) >= 1024:
            yield group
            group, size = [], 0
    if group:
        yield group


class Writer:
    """Writes the tokens of one split of one part."""

    def __init__(self, path: Path, job: Tokenization) -> None:
        self.job, self.path = job, path
        self.file = path.with_suffix(".tokens").open("wb")
        self.starts: list[int] = []
        self.tokens = self.bytes = 0

    def add(self, document: Document, ids: NDArray[Any]) -> None:
        if document.begins:
            self.starts.append(self.tokens)
            self._write(np.array([self.job.start]))
        self._write(ids)
        if document.ends and self.job.end != self.job.start:
            self._write(np.array([self.job.end]))
        self.bytes += len(document.text.encode())

    def _write(self, ids: NDArray[Any]) -> None:
        self.file.write(ids.astype(self.job.dtype).tobytes())
        self.tokens += len(ids)

    def counts(self) -> Counts:
        """Write what is left, and count."""
        self.file.flush()
        np.array(self.starts, dtype=np.int64).tofile(self.path.with_suffix(".starts"))
        return {"tokens": self.tokens, "documents": len(self.starts), "bytes": self.bytes}
