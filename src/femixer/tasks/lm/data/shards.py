"""Tokens on the disk: the folder that `build` writes and training reads through memory maps.

    index.json           what the tokens are of (corpus, tokenizer) and, once complete, the counts of every part
    tokenizer/           the tokenizer, as transformers saves it
    part-00000/          one finished part of the corpus; it is there completely or not at all
        train.tokens         token ids, uint16 or uint32
        train.starts         int64: where in them documents begin
        validation.tokens, validation.starts
        part.json            tokens, documents and bytes of text of both splits

The stream of a split is its tokens in all parts, one after the other. A document is its start token and the tokens of
its text; then comes the end token, unless that is the same as the start token: the next document's start is the end of
the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from femixer.options import check
from femixer.tasks.lm.data.corpus import SPLITS

INDEX, TOKENIZER, PART = "index.json", "tokenizer", "part.json"
FORMAT = 1
"""Goes up when folders written before can no longer be read."""

Counts = dict[str, int]
"""tokens, documents, bytes"""


class Shards:
    """A finished folder of tokens."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder = folder
        self.fingerprint: str = index["fingerprint"]
        self.vocabulary: int = index["identity"]["tokenizer"]["vocabulary"]
        self.start_token: int = index["identity"]["tokenizer"]["start"]
        self.end_token: int = index["identity"]["tokenizer"]["end"]
        dtype = dtype_for(self.vocabulary)
        places = [folder / part_name(number) for number in range(len(index["parts"]))]
        self.train, self.validation = (
            Split(name, places, [part[name] for part in index["parts"]], dtype) for name in SPLITS
        )

    @property
    def ends_are_starts(self) -> bool:
        """Is the end of a document marked by the start of the next?"""
        return self.start_token == self.end_token

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER


class Split:
    """The token stream of one split. `tokens`, `documents` and `bytes` (of text, as UTF-8) count what is in it."""

    def __init__(self, name: str, places: Sequence[Path], counts: Sequence[Counts], dtype: np.dtype[Any]) -> None:
        self.name = name
        filled = [(place, count) for place, count in zip(places, counts, strict=True) if count["tokens"]]
        self.places = [place for place, _ in filled]
        self.dtype = dtype
        self.tokens, self.documents, self.bytes = (
            sum(count[what] for _, count in filled) for what in ("tokens", "documents", "bytes")
        )
        self.edges = np.cumsum([0, *(count["tokens"] for _, count in filled)])

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Tokens start to stop of the stream, and the places within them at which documents begin."""
        check(0 <= start <= stop <= self.tokens, "stop", stop, f"0 <= start={start} <= stop <= tokens={self.tokens}")
        tokens, starts = [np.empty(0, self.dtype)], [np.empty(0, np.int64)]
        part = int(np.searchsorted(self.edges, start, side="right")) - 1
        while start < stop:
            begin = int(self.edges[part])
            end = min(stop, int(self.edges[part + 1]))
            ids, documents = open_part(self.places[part], self.name, self.dtype.str)
            tokens.append(ids[start - begin : end - begin])
            low, high = np.searchsorted(documents, [start - begin, end - begin])
            starts.append(documents[low:high] - (start - begin) + sum(len(one) for one in tokens[:-1]))
            start, part = end, part + 1
        return np.concatenate(tokens), np.concatenate(starts)


@lru_cache(maxsize=128)
def open_part(place: Path, split: str, dtype: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The memory maps of a part. Each takes a file handle, so not all of thousands of parts stay open."""
    tokens = np.memmap(place / f"{split}.tokens", dtype=dtype, mode="r")
    path = place / f"{split}.starts"
    # A memory map cannot be empty; a part in the middle of a long document has no start.
    starts = np.memmap(path, dtype=np.int64, mode="r") if path.stat().st_size else np.empty(0, np.int64)
    return np.asarray(tokens), np.asarray(starts)  # plain arrays over the same memory: slicing them is faster


def open_shards(folder: str | Path) -> Shards:
    """The tokens in a folder that `build` has finished."""
    folder = Path(folder)
    index = read_index(folder)
    if index is None:
        raise ValueError(f"shards={str(folder)!r} holds no tokens; `femixer lm data` prepares such a folder")
    if (lacking := incomplete(folder, index)) is not None:
        raise ValueError(f"shards={str(folder)!r} is not complete ({lacking}); the same `femixer lm data` finishes it")
    open_part.cache_clear()  # a folder may have been made anew since it was last read
    return Shards(folder, index)


def incomplete(folder: Path, index: Mapping[str, Any]) -> str | None:
    """What is not as the index says, if anything: parts that are missing or do not have the length they had."""
    if "parts" not in index:
        return "it was stopped before its end"
    dtype = dtype_for(index["identity"]["tokenizer"]["vocabulary"])
    for number, counts in enumerate(index["parts"]):
        if not intact(folder / part_name(number), counts, dtype):
            return f"{part_name(number)} is damaged or missing"
    return None


def read_index(folder: Path) -> dict[str, Any] | None:
    """index.json, or None where there is none."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        readable = index["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        readable = False
    check(readable, "shards", str(folder), f"a folder whose {INDEX} is of format {FORMAT}, or another folder")
    return index


def intact(place: Path, counts: Mapping[str, Counts], dtype: np.dtype[Any]) -> bool:
    """Do the files of a part have the lengths that its counts say?"""
    try:
        return all(
            (place / f"{name}.tokens").stat().st_size == counts[name]["tokens"] * dtype.itemsize
            and (place / f"{name}.starts").stat().st_size == counts[name]["documents"] * 8
            for name in SPLITS
        )
    except (OSError, KeyError):
        return False


def part_name(number: int) -> str:
    return f"part-{number:05}"


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
