"""In-context recall, plain and noisy: what value went with this key earlier in the sequence?"""

import numpy as np

from femixer.options import check
from femixer.tasks.mad.draw import IGNORE, Draw, Pair, next_token


def recall(
    draw: Draw,
    vocabulary: int,
    length: int,
    single_query: bool,
    noise: float = 0.0,
    noise_vocabulary: int = 0,
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
