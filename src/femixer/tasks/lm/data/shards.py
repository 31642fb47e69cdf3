"""Batches as a pure function of the step, whatever the number of processes, and the validation set once in order.

The token stream of a split is cut into windows of T inputs and, one place on, their T targets. Every epoch takes the
windows in an order of its own, which is computed and not stored; a stream of any length costs no memory. All tokens
are targets once per epoch, except the first, and at most T - 1 that are left over at the two ends of the stream
(others in every epoch).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from femixer.damage import Damaged, check_fields, read_json
from femixer.options import check, check_positive
from femixer.tasks.lm.data.corpus import SPLITS
from femixer.tasks.lm.data.tokenizer import identity, load_tokenizer
from femixer.training.distributed import Part
from femixer.training.seeding import derive

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
        self.tokenizer_identity: Mapping[str, Any] = index["identity"]["tokenizer"]
        dtype = dtype_for(self.vocabulary)
        places = [folder / part_name(number) for number in range(len(index["parts"]))]
        self.train, self.validation = (
            Split(name, places, [part[name] for part in index["parts"]], dtype, self.vocabulary) for name in SPLITS
        )

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER

    @cached_property
    def tokenizer(self) -> Any:
        """By which the tokens were made."""
        tokenizer = load_tokenizer(self.tokenizer_folder)
        if identity(tokenizer) != self.tokenizer_identity:
            raise Damaged(f"{self.tokenizer_folder}: not the tokenizer by which the tokens in {self.folder} were made")
        return tokenizer


class Split:
    """The token stream of one split. `tokens`, `documents` and `bytes` (of text, as UTF-8) count what is in it."""

    def __init__(
        self, name: str, places: Sequence[Path], counts: Sequence[Counts], dtype: np.dtype[Any], vocabulary: int
    ) -> None:
        self.name, self.vocabulary = name, vocabulary
        filled = {place: count for place, count in zip(places, counts, strict=True) if count["tokens"]}
        self.places, self.dtype = [*filled], dtype
        self.tokens, self.documents, self.bytes = (
            sum(count[what] for count in filled.values()) for what in ("tokens", "documents", "bytes")
        )
        self.edges = np.cumsum([0, *(count["tokens"] for count in filled.values())])

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
        return self._checked(np.concatenate(tokens), np.concatenate(starts))

    def _checked(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Bytes that changed on the disk are mostly no tokens of the vocabulary, or no places."""
        largest = int(tokens.max(initial=0))
        if largest >= self.vocabulary:
            told = f"{largest} is not below {self.vocabulary}"
            raise Damaged(f"{self.places[0].parent}: the tokens of {self.name} are damaged: {told}")
        if len(starts) and not (starts.min() >= 0 and starts.max() < len(tokens) and (np.diff(starts) > 0).all()):
            raise Damaged(f"{self.places[0].parent}: the starts of documents of {self.name} are damaged")
        return tokens, starts


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
        if finished_part(folder / part_name(number), dtype) != counts:
            return f"{part_name(number)} is damaged or missing"
    return None


def read_index(folder: Path) -> dict[str, Any] | None:
    """index.json, or None where there is none."""
    path = folder / INDEX
    if not path.exists():
        return None
    index = read_json(path)
    readable = isinstance(index, dict) and index.get("format") == FORMAT
    check(readable, "shards", str(folder), f"a folder whose {INDEX} is of format {FORMAT}, or another folder")
    check_fields(index, FIELDS, path)
    if index["fingerprint"] != fingerprint_of(index["identity"]):
        raise Damaged(f"{path}: fingerprint={index['fingerprint']!r} is not that of its identity; it was changed")
    return index


COUNTS = {"tokens": int, "documents": int, "bytes": int}
FIELDS = {
    "fingerprint": str,
    "identity": {"tokenizer": {"vocabulary": int, "start": int, "end": int, "digest": str}},
    "parts?": [dict.fromkeys(SPLITS, COUNTS)],
}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Of everything that decides the tokens."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def finished_part(place: Path, dtype: np.dtype[Any]) -> dict[str, Counts] | None:
    """What a part says of itself; None unless it is there and its files have the lengths that this means."""
    try:
        counts = check_fields(read_json(place / PART), dict.fromkeys(SPLITS, COUNTS), place / PART)
        fits = all(
            (place / f"{name}.tokens").stat().st_size == counts[name]["tokens"] * dtype.itemsize
            and (place / f"{name}.starts").stat().st_size == counts[name]["documents"] * 8
            for name in SPLITS
        )
    except (OSError, Damaged):
        return None
    return counts if fits else None


def part_name(number: int) -> str:
    return f"part-{number:05}"


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


IGNORED = -100
"""Target of a position that has none, as torch's cross entropy knows it."""


class Batch(NamedTuple):
    """T tokens of each of B sequences, [B, T] and int64 each."""

    inputs: Tensor
    targets: Tensor
    """The next token, already shifted; IGNORED where there is none."""
    segments: Tensor
    """Number of the document within the sequence; -1 where the sequence is padding."""


ALL = Part()


class Batches:
    """Training batches: `stream(step)`, or a part of one with `stream(step, part)`."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int = 0) -> None:
        check_positive(context=context, batch=batch)
        self.shards, self.context, self.batch, self.seed = shards, context, batch, seed
        self.windows = (shards.train.tokens - 1) // context
        """Windows per epoch."""
        if self.windows < 1:
            raise ValueError(
                f"the training text has {shards.train.tokens} tokens, too few for one window of context={context} "
                f"(which needs {context + 1}); choose a smaller context or more text"
            )

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context

    def epoch(self, step: int) -> float:
        """How often the text has been seen before this step."""
        return step * self.batch / self.windows

    def __call__(self, step: int, part: Part = ALL) -> Batch:
        check(step >= 0, "step", step, "a whole number of at least 0")
        numbers = step * self.batch + np.arange(self.batch)[part.rows(self.batch)]
        left_over = self.shards.train.tokens - 1 - self.windows * self.context
        starts = []
        for epoch in np.unique(numbers // self.windows).tolist():
            within = numbers[numbers // self.windows == epoch] - epoch * self.windows
            shift = derive(self.seed, "windows", epoch) % (left_over + 1)
            order = permuted(within, self.windows, derive(self.seed, "order", epoch))
            starts.append(order * self.context + shift)
        return gather(self.shards, self.shards.train, np.concatenate(starts), self.context, len(numbers))


class Validation:
    """The held-out text: every token is a target exactly once (except the very first).

    All batches have the shape [batch, context]; the last one is filled up with padding. `windows` stops after that
    many windows.
    """

    def __init__(self, shards: Shards, context: int, batch: int, windows: int | None = None) -> None:
        check_positive(context=context, batch=batch, windows=windows)
        self.shards, self.split, self.context, self.batch = shards, shards.validation, context, batch
        whole = -(-(self.split.tokens - 1) // context)
        self.windows = whole if windows is None else min(windows, whole)
        if self.windows < 1:
            raise ValueError(f"the validation text has {self.split.tokens} tokens; at least 2 are needed")

    @property
    def bytes(self) -> float:
        """Bytes of text that the targets stand for: bits per byte = nats / (log 2 * bytes). Where `windows` leaves
        some out, they are taken to be as long as the others."""
        covered = min(self.windows * self.context, self.split.tokens - 1)
        return self.split.bytes * covered / (self.split.tokens - 1)

    def __len__(self) -> int:
        return -(-self.windows // self.batch)

    def batches(self, part: Part = ALL) -> Iterator[Batch]:
        """All of them, or a part of each, padding included."""
        rows = np.arange(self.batch)[part.rows(self.batch)]
        for index in range(len(self)):
            numbers = index * self.batch + rows
            starts = numbers[numbers < self.windows] * self.context
            yield gather(self.shards, self.split, starts, self.context, len(rows))


def gather(shards: Shards, split: Split, starts: NDArray[np.int64], context: int, rows: int) -> Batch:
    """The windows that begin at `starts`; short ones and missing rows are padding."""
    ids = np.full((rows, context + 1), shards.end_token, dtype=np.int64)
    begins = np.zeros((rows, context + 1), dtype=np.int64)
    length = np.zeros((rows, 1), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        tokens, documents = split.read(start, min(start + context + 1, split.tokens))
        ids[row, : len(tokens)] = tokens
        begins[row, documents] = 1
        length[row] = len(tokens) - 1
    position = np.arange(context)
    targets = ids[:, 1:].copy()
    targets[position >= length] = IGNORED
    if shards.start_token != shards.end_token:  # else it is our end too, which the model is to guess
        targets[begins[:, 1:] == 1] = IGNORED
    segments = begins[:, :-1].cumsum(1)
    segments[position >= length] = -1
    return Batch(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (ids[:, :-1], targets, segments)))


def permuted(index: NDArray[np.int64], count: int, key: int) -> NDArray[np.int64]:
    """A permutation of 0 .. count - 1, applied to `index`: one of many, chosen by `key`.

    A Feistel network permutes the numbers of an even number of bits; what lands outside is permuted again until it is
    inside, which keeps it one to one.
    """
    half = np.uint64(((count - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive(key, turn)) for turn in range(8)]

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for each in keys:
            left, right = right, left ^ (scrambled(right ^ each) & mask)
        return left << half | right

    result = network(index.astype(np.uint64))
    while (outside := result >= count).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)


def scrambled(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of x: two rounds of multiply and shift, modulo 2^64."""
    for factor, shift in ((0x9E3779B97F4A7C15, 32), (0xD6E8FEB86659FD93, 29)):
        x = x * np.uint64(factor)
        x = x ^ (x >> np.uint64(shift))
    return x
