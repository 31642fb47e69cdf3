"""Selective copying: repeat the content tokens that stand among blanks, in order."""

import numpy as np

from femixer.options import check
from femixer.tasks.mad.draw import IGNORE, Draw, Pair


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
