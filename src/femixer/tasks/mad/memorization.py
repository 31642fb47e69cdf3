"""Memorization: a map from keys to values that the sequence does not show, only the training targets do."""

import numpy as np

from femixer.options import check
from femixer.tasks.mad.draw import IGNORE, Draw, Pair


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
