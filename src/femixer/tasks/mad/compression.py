"""Compression: repeat the whole input from what the last position knows of it."""

from femixer.options import check
from femixer.tasks.mad.draw import Draw, Pair


def compression(draw: Draw, vocabulary: int, length: int) -> Pair:
    """L-1 tokens of 0..V-2, then V-1; the target is the input. The model decodes it from its last position alone."""
    check(vocabulary >= 3, "vocabulary", vocabulary, "3 or more: two tokens and the one that ends the sequence")
    check(length >= 2, "length", length, "2 or more")
    inputs = draw.rng.integers(vocabulary - 1, size=(draw.n, length))
    inputs[:, -1] = vocabulary - 1
    return inputs, inputs.copy()
