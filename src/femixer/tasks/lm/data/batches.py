"""Batches as a pure function of the step, whatever the number of processes, and the validation set once in order.

The token stream of a split is cut into windows of T inputs and, one place on, their T targets. Every epoch takes the
windows in an order of its own, which is computed and not stored; a stream of any length costs no memory. All tokens
are targets once per epoch, except the first, and at most T - 1 that are left over at the two ends of the stream
(others in every epoch).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from femixer.options import check
from femixer.tasks.lm.data.shards import Shards, Split
from femixer.training.seeding import derive

IGNORED = -100
"""Target of a position that has none, as torch's cross entropy knows it."""


class Batch(NamedTuple):
    """T tokens of each of B sequences, [B, T] and int64 each."""

    inputs: Tensor
    targets: Tensor
    """The next token, already shifted; IGNORED where there is none."""
    segments: Tensor
    """Number of the document within the sequence; -1 where the sequence is padding."""


class Batches:
    """Training batches: `stream(step)`, or the share of process `rank` of `world` with `stream(step, rank, world)`."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int = 0) -> None:
        check(context > 0, "context", context, "a whole number above 0")
        check(batch > 0, "batch", batch, "a whole number above 0")
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

    def __call__(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        check(step >= 0, "step", step, "a whole number of at least 0")
        rows = share(self.batch, rank, world)
        numbers = step * self.batch + np.arange(rows.start, rows.stop)
        starts = np.concatenate([self._starts(int(epoch), numbers) for epoch in np.unique(numbers // self.windows)])
        return gather(self.shards, self.shards.train, starts, self.context, len(rows))

    def _starts(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the windows begin: those of `numbers` that fall into this epoch."""
        within = numbers[numbers // self.windows == epoch] - epoch * self.windows
        left_over = self.shards.train.tokens - 1 - self.windows * self.context
        shift = derive(self.seed, "windows", epoch) % (left_over + 1)
        return permuted(within, self.windows, derive(self.seed, "order", epoch)) * self.context + shift


class Validation:
    """The held-out text: every token is a target exactly once (except the very first).

    All batches have the shape [batch, context]; the last one is filled up with padding. `windows` stops after that
    many windows.
    """

    def __init__(self, shards: Shards, context: int, batch: int, windows: int | None = None) -> None:
        check(context > 0, "context", context, "a whole number above 0")
        check(batch > 0, "batch", batch, "a whole number above 0")
        check(windows is None or windows > 0, "windows", windows, "a whole number above 0")
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

    def batches(self, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """All of them, or the share of one process: as many batches for each, padding included."""
        rows = share(self.batch, rank, world)
        for index in range(len(self)):
            numbers = index * self.batch + np.arange(rows.start, rows.stop)
            yield gather(
                self.shards, self.split, numbers[numbers < self.windows] * self.context, self.context, len(rows)
            )


def share(batch: int, rank: int, world: int) -> range:
    """The rows of a batch that belong to one process."""
    check(world > 0 and batch % world == 0, "batch", batch, f"a multiple of the number of processes, {world}")
    check(0 <= rank < world, "rank", rank, f"0 to {world - 1}")
    return range(rank * batch // world, (rank + 1) * batch // world)


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
    if not shards.ends_are_starts:  # the next document is not the model's to guess; where its start is our end, it is
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
