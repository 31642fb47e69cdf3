"""Elementary functions that LLVM can vectorise, for compiled kernels.

exp is accurate to float32 for float32 arguments (about 1e-7, enough for sums kept in float64) and to float64 for
others, log to about 1e-12. Kernels keep their states and sums in float64. exp32, sigmoid32 and softplus32 compute in
float32, for what is not summed up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from femixer.kernels.numba_kernel import MATH, compiled, inline, summing


@summing
def dot(a, m, b):  # type: ignore[no-untyped-def]
    """sum over i of a[m, i] b[i], in any order."""
    total = 0.0
    for i in range(b.size):
        total += a[m, i] * b[i]
    return total


@compiled(fastmath={*MATH, "reassoc", "nnan"}, error_model="numpy")
def largest(a):  # type: ignore[no-untyped-def]
    """The largest of numbers >= 0."""
    top = 0.0
    for i in range(a.size):
        top = max(top, a[i])
    return top


def _bitcast(source: Any, target: Any) -> Any:
    def typed(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


_float_of = _bitcast(types.int32, types.float32)
_bits32_of = _bitcast(types.float32, types.int32)
_double_of = _bitcast(types.int64, types.float64)
_bits_of = _bitcast(types.float64, types.int64)


f32 = np.float32
LEAST, MOST = f32(-87.0), f32(88.0)
ROUND = f32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to a whole number
LOG2_E = f32(math.log2(math.e))
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)


@inline
def _exp_parts(x):  # type: ignore[no-untyped-def]
    """2^n and exp(r) - 1 with x = n log 2 + r, for -87 <= x <= 88."""
    n = (x * LOG2_E + ROUND) - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    return _float_of((np.int32(n) + np.int32(127)) << np.int32(23)), _exp_less_one(r)


@inline
def _exp_less_one(r):  # type: ignore[no-untyped-def]
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    return p * r * r + r


def exp(x: Any) -> Any:
    """exp(x) for x <= 0 as float64; the small difference to 1 near x = 0 keeps its digits."""
    raise TypeError("for compiled code only")


@overload(exp, jit_options={"fastmath": MATH, "error_model": "numpy", "forceinline": True})
def _(x):  # type: ignore[no-untyped-def]
    if x == types.float32:

        def single(x):  # type: ignore[no-untyped-def]
            scale, rest = _exp_parts(max(x, LEAST))
            value = np.float64(scale) * (1.0 + np.float64(rest))
            return 0.0 if x <= LEAST else value

        return single
    return lambda x: math.exp(x)


def exp_wide(x: Any, like: Any) -> Any:
    """exp(x) of x in float64, up to 700, with the digits of `like` and the range of float64."""
    raise TypeError("for compiled code only")


WIDE_ROUND = 6755399441055744.0  # 1.5 * 2^52


@overload(exp_wide, jit_options={"fastmath": MATH, "error_model": "numpy", "forceinline": True})
def _(x, like):  # type: ignore[no-untyped-def]
    if like == types.float32:

        def single(x, like):  # type: ignore[no-untyped-def]
            shifted = max(x, -700.0) * 1.4426950408889634 + WIDE_ROUND
            n = shifted - WIDE_ROUND
            r = f32((max(x, -700.0) - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10)
            scale = _double_of((_bits_of(shifted) + np.int64(1023)) << np.int64(52))
            value = scale * (1.0 + np.float64(_exp_less_one(r)))
            return 0.0 if x <= -700.0 else value

        return single
    return lambda x, like: math.exp(x)


@inline
def exp32(x):  # type: ignore[no-untyped-def]
    """exp(x) in float32, 0 below -87 and constant above 88."""
    scale, rest = _exp_parts(min(max(x, LEAST), MOST))
    # Written as `<=` so that NaN propagates.
    return f32(0.0) if x <= LEAST else scale * rest + scale


@inline
def exp_less32(x, base):  # type: ignore[no-untyped-def]
    """exp(x) - base for a base of 0 or 1, without cancellation."""
    scale, rest = _exp_parts(min(max(x, LEAST), MOST))
    return -base if x <= LEAST else scale * rest + (scale - base)


@inline
def log_plus32(x, base):  # type: ignore[no-untyped-def]
    """log(x + base) for a base of 0 or 1 and normal x + base > 0, without cancellation."""
    y = x + base
    # Mantissa in [sqrt(1/2), sqrt(2)): the exponent's last step is decided by the bits of sqrt(1/2).
    exponent = (_bits32_of(y) - np.int32(0x3F3504F3)) >> np.int32(23)
    m = _float_of(_bits32_of(y) - (exponent << np.int32(23)))
    less = x + (base - f32(1.0)) if exponent == 0 else m - f32(1.0)
    s = less / (f32(2.0) + less)
    z = s * s
    series = z * (f32(1 / 3) + z * (f32(1 / 5) + z * (f32(1 / 7) + z * f32(1 / 9))))
    # The largest part is exact in few bits, so that the sum rounds once.
    return f32(exponent) * LN2_HIGH + (f32(exponent) * LN2_LOW + f32(2.0) * s * series + f32(2.0) * s)


@inline
def sigmoid32(x):  # type: ignore[no-untyped-def]
    return f32(1.0) / (f32(1.0) + exp32(-x))


@inline
def softplus32(x):  # type: ignore[no-untyped-def]
    return softplus_slope32(x)[0]


@inline
def softplus_slope32(x):  # type: ignore[no-untyped-def]
    """max(x, 0) + log(1 + w), w = exp(-|x|), and its derivative, the sigmoid.

    The logarithm is 2 artanh(w / (2 + w)): good digits also far below 0.
    """
    w = exp32(-abs(x))
    s = w / (f32(2.0) + w)
    z = s * s
    p = z * f32(1 / 13) + f32(1 / 11)
    p = p * z + f32(1 / 9)
    p = p * z + f32(1 / 7)
    p = p * z + f32(1 / 5)
    p = p * z + f32(1 / 3)
    slope = (f32(1.0) if x > f32(0.0) else w) / (f32(1.0) + w)
    return max(x, f32(0.0)) + f32(2.0) * s * (p * z + f32(1.0)), slope


@inline
def log(x):  # type: ignore[no-untyped-def]
    """log(x) for normal x > 0 in float64, to about 1e-12."""
    bits = _bits_of(x)
    # Mantissa in [sqrt(1/2), sqrt(2)): the exponent's last step is decided by the bits of sqrt(1/2).
    shifted = bits - np.int64(0x3FE6A09E667F3BCD)
    whole = (shifted >> np.int64(52)) + np.int64(2048)
    exponent = _double_of(whole | np.int64(0x4330000000000000)) - (4503599627370496.0 + 2048.0)
    m = _double_of(bits - ((shifted >> np.int64(52)) << np.int64(52)))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13))))))
    return exponent * 0.6931471805599453 + 2.0 * s * series
