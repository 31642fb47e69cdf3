"""Compiled loop of rotary angles, in float64."""

import math

from femixer.kernels.numba_math import job


@job
def forward(position, base, cos, sin):  # type: ignore[no-untyped-def]
    """position [n]; cos, sin [..., width / 2], of n positions."""
    pairs, c, s = cos.shape[-1], cos.reshape(-1), sin.reshape(-1)
    for n in range(position.size):
        for i in range(pairs):
            angle = position[n] * base ** (-float(i) / pairs)
            c[n * pairs + i], s[n * pairs + i] = math.cos(angle), math.sin(angle)
