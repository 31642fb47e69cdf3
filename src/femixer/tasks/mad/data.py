"""The six tasks: their sequences, their parameters and how MAD varies them, drawn anew and the same every time."""

import hashlib
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from femixer.options import check

IGNORE = -100
"""Target of positions that are not scored."""

Pair = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, int64 [n, T] each."""


@dataclass(frozen=True)
class Draw:
    """n sequences of one split."""

    n: int
    training: bool
    """Training and testing sequences differ in targets (recall), or also in how they are drawn (fuzzy recall)."""
    seed: int
    """For what is the same in all splits; everything else comes from `rng`."""
    rng: np.random.Generator


def next_token(sequence: np.ndarray, scored: np.ndarray, training: bool) -> Pair:
    """Shifted by one, [n, T + 1] -> [n, T]: training predicts all of `sequence`, a test what `scored` holds of it."""
    return sequence[:, :-1], (sequence if training else scored)[:, 1:]


def compression(draw: Draw, vocabulary: int, length: int) -> Pair:
    """L-1 tokens of 0..V-2, then V-1; the target is the input. The model decodes it from its last position alone."""
    check(vocabulary >= 3, "vocabulary", vocabulary, "3 or more: two tokens and the one that ends the sequence")
    check(length >= 2, "length", length, "2 or more")
    inputs = draw.rng.integers(vocabulary - 1, size=(draw.n, length))
    inputs[:, -1] = vocabulary - 1
    return inputs, inputs.copy()


def memorization(draw: Draw, vocabulary: int, length: int) -> Pair:
    """L/2 times [key, insert]; the target at the insert position V-1 is the value of the key before it."""
    check(vocabulary >= 5, "vocabulary", vocabulary, "5 or more: two keys, two values and the insert token")
    check(length >= 2 and length % 2 == 0, "length", length, "an even number of 2 or more")
    values = value_of_key(vocabulary, draw.seed)
    keys = draw.rng.integers(len(values), size=(draw.n, length // 2))
    inputs = np.stack([keys, np.full_like(keys, vocabulary - 1)], -1)
    targets = np.stack([np.full_like(keys, IGNORE), values[keys]], -1)
    return inputs.reshape(draw.n, length), targets.reshape(draw.n, length)


def value_of_key(vocabulary: int, seed: int) -> np.ndarray:
    """[keys]: a different value for each key, the same in all splits.

    The V-1 tokens besides the insert token are keys in the first half and values in the second, one more if V is even.
    """
    keys = (vocabulary - 1) // 2
    return np.random.default_rng([seed, vocabulary]).permutation(np.arange(keys, vocabulary - 1))[:keys]


def recall(
    draw: Draw, vocabulary: int, length: int, single_query: bool, noise: float = 0.0, noise_vocabulary: int = 0
) -> Pair:
    """L/2-1 slots of [key, value], then one more pair, whose key is uniform over the distinct keys shown.

    The tokens are keys, values and noise, in this order, and with `single_query` a copy prefix V-1 that stands before
    the last key. A key's value is drawn at its first use and fixed for the sequence. With probability `noise` a slot
    holds two noise tokens instead, except one slot, so that there is a key to ask for. Scored in tests: values of keys
    that were shown before, or with `single_query` only the last.
    """
    check(0 <= noise < 1, "noise", noise, "a probability of 0 or more, below 1")
    least = int(noise > 0)
    check(noise_vocabulary >= least, "noise_vocabulary", noise_vocabulary, f"{least} or more for noise={noise}")
    plain = vocabulary - noise_vocabulary - single_query
    smallest = 4 + noise_vocabulary + single_query
    check(plain >= 4, "vocabulary", vocabulary, f"{smallest} or more: two keys, two values and what is neither")
    check(length >= 4 and length % 2 == 0, "length", length, "an even number of 4 or more")
    rng, shape = draw.rng, (draw.n, length // 2 - 1)

    keys = rng.integers(plain // 2, size=shape)
    noisy = rng.random(shape) < noise
    # The original draws the slot without noise among L/2, the last pair too, and fails where no key is left to ask for.
    np.put_along_axis(noisy, rng.integers(shape[1], size=(draw.n, 1)), False, 1)
    slot = np.arange(shape[1])
    first = first_use(np.where(noisy, plain + slot, keys))  # a slot of noise has a name of its own, so it is no repeat
    values = np.take_along_axis(rng.integers(plain // 2, plain, size=shape), first, 1)
    pairs = np.stack([keys, values], -1)
    if noise_vocabulary:
        pairs = np.where(noisy[..., None], rng.integers(plain, plain + noise_vocabulary, size=pairs.shape), pairs)

    lots = np.where((first == slot) & ~noisy, rng.random(shape), -1)
    asked = np.take_along_axis(pairs, lots.argmax(1)[:, None, None], 1)[:, 0]
    prefix = np.full((draw.n, int(single_query)), vocabulary - 1)
    sequence = np.concatenate([pairs.reshape(draw.n, length - 2), prefix, asked], 1)
    scored = np.full_like(sequence, IGNORE)
    if not single_query:
        scored[:, 1 : length - 2 : 2] = np.where(first != slot, values, IGNORE)
    scored[:, -1] = sequence[:, -1]
    return next_token(sequence, scored, draw.training)


def first_use(keys: np.ndarray) -> np.ndarray:
    """For each of keys [n, slots] the first slot of its row that has the same key."""
    order = np.argsort(keys, 1, kind="stable")
    ordered = np.take_along_axis(keys, order, 1)
    changes = np.ones(keys.shape, bool)
    changes[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    begins = np.maximum.accumulate(np.where(changes, np.arange(keys.shape[1]), 0), 1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, begins, 1), 1)
    return first


def fuzzy_recall(draw: Draw, vocabulary: int, length: int, motif: int) -> Pair:
    """Pairs of a key motif and a value motif, and at the end the probe, a pair that stands among them already.

    The pad is V-1; the other tokens are keys in the first half and values in the second. Sizes are uniform in 1..motif,
    except that keys of tests always have `motif` tokens. The probe has a place, uniform in range(L - 2 |probe|). While
    the sequence is shorter than L - |probe| - 2 motif it grows: by the probe, when its place is reached and its key has
    not appeared by chance, and else by a random key with the value of its first use, where the probe's key has the
    probe's value. Left-padded to L+1, then shifted. Scored in tests: values of keys shown before, and the last value.
    A place near the end may be passed by the last pair: 2.6 % of the last values in tests cannot be known (L 128).
    """
    keys = (vocabulary - 1) // 2
    check(motif >= 1 and (keys + 1) ** motif < 2**63, "motif", motif, "1 or more, with fewer than 2^63 keys in all")
    check(keys >= max(motif, 2), "vocabulary", vocabulary, f"{2 * max(motif, 2) + 1} or more for motif={motif}")
    check(length > 4 * motif, "length", length, f"{4 * motif + 1} or more for motif={motif}")
    smallest = 1 if draw.training else motif
    shape = (draw.n, 1 + length // (smallest + 1))  # the probe, then no fewer pairs than can be shown
    key, key_size = motifs(draw.rng, shape, keys, smallest, motif)
    value, value_size = motifs(draw.rng, shape, vocabulary - 1 - keys, 1, motif)
    use = first_use(number(key, key_size, keys))
    value = keys + np.take_along_axis(value, use[..., None], 1)
    value_size = np.take_along_axis(value_size, use, 1)

    size = key_size + value_size
    place = draw.rng.integers(length - 2 * size[:, :1])
    begin, shown, known = arrange(use, size, place, length - size[:, :1] - 2 * motif)
    key, key_size, value, value_size = (np.insert(of, 0, of[:, 0], 1) for of in (key, key_size, value, value_size))
    begin += length + 1 - (begin + key_size + value_size)[:, 1:2]  # the last probe ends at L+1
    sequence = np.full((draw.n, length + 1), vocabulary - 1)
    scored = np.full_like(sequence, IGNORE)
    write(sequence, begin, key, key_size, shown)
    write(sequence, begin + key_size, value, value_size, shown)
    write(scored, begin + key_size, value, value_size, shown & known)
    return next_token(sequence, scored, draw.training)


def motifs(rng: np.random.Generator, shape: tuple[int, int], tokens: int, smallest: int, largest: int) -> Pair:
    """Tuples of distinct tokens [*shape, largest], of which only the first `size` [*shape] count, and these sizes."""
    size = rng.integers(smallest, largest + 1, size=shape)
    motif = np.empty((*shape, largest), np.int64)
    for at in range(largest):
        token = rng.integers(tokens - at, size=shape)  # the how-manieth of those that are left
        for taken in np.moveaxis(np.sort(motif[..., :at]), -1, 0):
            token += token >= taken
        motif[..., at] = token
    return motif, size


def number(motif: np.ndarray, size: np.ndarray, tokens: int) -> np.ndarray:
    """[..., largest], [...] -> [...]: equal only for equal motifs. The tokens are digits from 1 on, 0 is no token."""
    at = np.arange(motif.shape[-1])
    return np.where(at < size[..., None], motif + 1, 0) @ (tokens + 1) ** at


def arrange(
    use: np.ndarray, size: np.ndarray, place: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put the probe between two pairs and leave out those after the end: no pair depends on where either is.

    use, size [n, 1 + pairs]: the first use of a pair's key (0: the probe's key) and its size; column 0 is the probe.
    place, limit [n, 1]: the probe comes before the first pair that begins at its place or later; the sequence ends with
    the pair that reaches the limit.
    Returns [n, 2 + pairs]: where each begins, whether it is shown, whether its key was shown before. The first two are
    the probe, inserted and at the end.
    """
    pair, probe, size = np.arange(1, size.shape[1]), size[:, :1], size[:, 1:]
    begin = np.cumsum(size, 1) - size
    chance = use[:, 1:] == 0
    appeared = np.cumsum(chance, 1) - chance > 0
    due = (begin >= place) & (begin < limit)
    at = due.argmax(1)[:, None]
    inserted = due.any(1, keepdims=True) & ~np.take_along_axis(appeared, at, 1)
    after = inserted & (pair > at)
    insertion = np.take_along_axis(begin, at, 1)
    begin = begin + probe * after
    shown = begin < limit
    end = probe * inserted + (size * shown).sum(1, keepdims=True)
    known = np.where(chance, appeared | after, use[:, 1:] != pair)
    last = np.ones_like(inserted)
    return (
        np.concatenate([insertion, end, begin], 1),
        np.concatenate([inserted, last, shown], 1),
        np.concatenate([~last, last, known], 1),
    )


def write(sequence: np.ndarray, begin: np.ndarray, motif: np.ndarray, size: np.ndarray, where: np.ndarray) -> None:
    """Put the motifs [n, pairs, largest] into sequence [n, T], those of `where` [n, pairs] only."""
    at = np.arange(motif.shape[-1])
    there = where[..., None] & (at < size[..., None])
    sequence[there.nonzero()[0], (begin[..., None] + at)[there]] = motif[there]


def selective_copying(draw: Draw, vocabulary: int, length: int, copies: int) -> Pair:
    """`copies` content tokens among L-2n-1 blanks, the copy token V-1, n blanks where the content is the target.

    Every blank V-2 stands before one of the content tokens, each equally likely, so the last content token stands
    right before the copy token.
    """
    check(vocabulary >= 4, "vocabulary", vocabulary, "4 or more: two content tokens, the blank and the copy token")
    check(copies >= 1, "copies", copies, "1 or more")
    blanks = length - 2 * copies - 1
    check(blanks >= 1, "length", length, f"{2 * copies + 2} or more for copies={copies}")
    content = draw.rng.integers(vocabulary - 2, size=(draw.n, copies))
    before = draw.rng.multinomial(blanks, np.full(copies, 1 / copies), size=draw.n)
    inputs = np.full((draw.n, length), vocabulary - 2)
    np.put_along_axis(inputs, np.cumsum(before, 1) + np.arange(copies), content, 1)
    inputs[:, length - copies - 1] = vocabulary - 1
    targets = np.full_like(inputs, IGNORE)
    targets[:, length - copies :] = content
    return inputs, targets


Parameters = dict[str, Any]


@dataclass(frozen=True)
class MadTask:
    """What there is to know of a task besides its data."""

    name: str
    title: str
    """As in the paper's table."""
    generate: Callable[..., Pair]
    """(draw, **parameters) -> inputs and targets; it checks the parameters, and has all of them but `train`."""
    defaults: Mapping[str, Any]
    """vocabulary: the number of tokens, special ones and noise included; length; train: the number of training
    sequences; and what only this task has."""
    sweeps: Mapping[str, tuple[Any, ...]]
    """The values of a parameter besides its default; they are varied one at a time."""
    answers: Callable[[Mapping[str, Any]], int]
    """Parameters -> how many tokens can be the answer, where it is not the same in all sequences."""
    last_position_only: bool = False
    """All targets are decoded from the model's last position."""

    def settings(self) -> list[Parameters]:
        """All parameters of each setting: the baseline, then the sweeps."""
        varied = [{**self.defaults, name: value} for name, values in self.sweeps.items() for value in values]
        return [{**self.defaults}, *varied]

    def chance(self, **parameters: Any) -> float:
        """Accuracy, macro-averaged over tokens, of guessing blindly among the tokens that can be the answer."""
        answers = self.answers({**self.defaults, **parameters})
        # Compression also scores the token that ends every sequence, which nobody gets wrong.
        return 2 / (answers + 1) if self.last_position_only else 1 / answers


def upper_half(tokens: int) -> int:
    """Tokens 0, 1, ... are split into keys and values; values are one more where the number is odd."""
    return tokens - tokens // 2


SEQUENCES = (6400, 3200, 1600, 800)

TASKS = {
    task.name: task
    for task in (
        MadTask(
            "compression",
            "Compress",
            compression,
            {"vocabulary": 16, "length": 32, "train": 12800},
            {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "train": SEQUENCES},
            lambda given: given["vocabulary"] - 1,
            last_position_only=True,
        ),
        MadTask(
            "fuzzy-recall",
            "Fuzzy Recall",
            fuzzy_recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "motif": 3},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        MadTask(
            "recall",
            "In-Ctx Recall",
            recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "single_query": False},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - given["single_query"]),
        ),
        MadTask(
            "memorization",
            "Memorize TrainSet",
            memorization,
            {"vocabulary": 256, "length": 32, "train": 256},
            {"vocabulary": (512, 1024, 2048, 4096, 8192)},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        MadTask(
            "noisy-recall",
            "Noisy Recall",
            recall,
            {
                "vocabulary": 32,
                "length": 128,
                "train": 12800,
                "single_query": False,
                "noise": 0.2,
                "noise_vocabulary": 16,
            },
            {"vocabulary": (48, 80, 144), "length": (256, 512, 1024), "train": SEQUENCES, "noise": (0.4, 0.6, 0.8)},
            lambda given: upper_half(given["vocabulary"] - given["noise_vocabulary"] - given["single_query"]),
        ),
        MadTask(
            "selective-copying",
            "Selective Copy",
            selective_copying,
            {"vocabulary": 16, "length": 256, "train": 12800, "copies": 16},
            {"vocabulary": (32, 64, 128), "length": (512, 1024), "train": SEQUENCES, "copies": (32, 64, 96)},
            lambda given: given["vocabulary"] - 2,
        ),
    )
}
"""By name, in the order of the paper's columns."""


SPLITS = ("train", "validation", "test")
BLOCK = 1024
"""Sequences drawn at a time, each block with random numbers of its own: it bounds the memory of what is in between."""


def sample(task: str, n: int, split: str = "train", seed: int = 0, **parameters: Any) -> Pair:
    """n sequences of a task: inputs and targets, int64 [n, T] each, targets IGNORE where nothing is scored.

    `parameters` are those of `TASKS[task].defaults`. The random numbers are decided by task, split, seed and all
    parameters. The test split is the original's; validation is drawn in the same way and is ours.
    """
    check(task in TASKS, "task", task, f"one of {', '.join(TASKS)}")
    check(split in SPLITS, "split", split, f"one of {', '.join(SPLITS)}")
    n, seed = whole("n", n), whole("seed", seed)
    complete = completed(TASKS[task], parameters)
    identity = json.dumps([task, split, seed, complete], sort_keys=True)
    entropy = int.from_bytes(hashlib.sha256(identity.encode()).digest(), "little")
    given = {name: value for name, value in complete.items() if name != "train"}
    blocks = []
    for start in range(0, max(n, 1), BLOCK):
        draw = Draw(min(BLOCK, n - start), split == "train", seed, np.random.default_rng([entropy, start]))
        blocks.append(TASKS[task].generate(draw, **given))
    inputs, targets = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return inputs, targets


def completed(task: MadTask, parameters: Parameters) -> Parameters:
    """All parameters of the task, each of the type that its default has."""
    for name in parameters:
        check(name in task.defaults, "parameter", name, f"one of {', '.join(task.defaults)} for task={task.name!r}")
    complete: Parameters = {}
    for name, default in task.defaults.items():
        value = parameters.get(name, default)
        if isinstance(default, bool):
            check(isinstance(value, bool), name, value, "True or False")
        elif isinstance(default, int):
            value = whole(name, value)
        else:
            check(isinstance(value, float | int), name, value, "a number")
            value = float(value)
        complete[name] = value
    check(complete["train"] > 0, "train", complete["train"], "a whole number above 0")
    return complete


def whole(name: str, value: Any) -> int:
    """The value as an int, whatever kind of integer it is; it must not be negative."""
    fits = hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0
    check(fits, name, value, "a whole number of 0 or more")
    return operator.index(value)
