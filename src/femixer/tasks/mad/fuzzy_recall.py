"""Fuzzy in-context recall: keys and values are motifs, tuples of distinct tokens, of different sizes."""

import numpy as np

from femixer.options import check
from femixer.tasks.mad.draw import IGNORE, Draw, Pair, next_token
from femixer.tasks.mad.recall import first_use


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
