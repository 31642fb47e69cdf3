"""The sequences of the six tasks: what a generator is asked for, and how each draws its inputs and targets."""

from dataclasses import dataclass

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
