"""Elementary functions of the compiled loops, as exact as they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture(scope="module")
def functions() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """exp and log of the kernels, compiled as there."""
    import numba

    from femixer.kernels import numba_math as primitives

    exp, log = primitives.exp, primitives.log
    options = {"fastmath": primitives.MATH, "error_model": "numpy"}

    @numba.njit(**options)
    def exps(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = exp(x[i])

    @numba.njit(**options)
    def logs(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = log(x[i])

    def run(kernel: Callable[..., None]) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            out = np.full(x.shape, np.nan)
            kernel(x, out)
            return out

        return call

    return {"exp": run(exps), "log": run(logs)}


class TestPrimitives:
    def test_exp_of_float32(self, functions: dict):
        x = np.concatenate([np.linspace(-86.999, 0, 200_001), -np.logspace(-30, 1.9, 10_001)]).astype(np.float32)
        error = functions["exp"](x) / np.exp(x.astype(np.float64)) - 1
        assert np.abs(error).max() < 2e-7
        near = -np.logspace(-30, -1, 2_001).astype(np.float32)  # 1 - exp(x) keeps its digits until float64 has none
        difference = functions["exp"](near) - 1 - np.expm1(near.astype(np.float64))
        assert (np.abs(difference) <= 2e-7 * np.abs(near) + 2.3e-16).all()

    def test_exp_of_float32_at_its_borders(self, functions: dict):
        least, single = np.float32(-87), np.float32
        x = np.array([0, -0.0, -np.inf, least, np.nextafter(least, single(0)), np.nextafter(least, single(-100)), -88,
                      -104, -1e4, -3e38], np.float32)  # fmt: skip
        found = functions["exp"](x)
        assert found[:3].tolist() == [1.0, 1.0, 0.0]
        assert found[4] == pytest.approx(math.exp(x[4]), rel=2e-7)
        assert found[[3, 5, 6, 7, 8, 9]].max() <= math.exp(-87) * (1 + 1e-6)
        assert found.min() >= 0.0
        assert found[7:].tolist() == [0.0, 0.0, 0.0]

    def test_exp_of_float64(self, functions: dict):
        x = np.concatenate([np.linspace(-700, 0, 100_001), [-np.inf, -1e4]])
        np.testing.assert_allclose(functions["exp"](x), np.exp(x), rtol=1e-15, atol=0)

    def test_log(self, functions: dict):
        spread = np.logspace(-307, 307, 100_001)
        near = 1 + np.concatenate([-np.logspace(-15, -0.5, 5_001), np.logspace(-15, 0, 5_001)])
        root = math.sqrt(0.5)
        borders = np.array(
            [root, np.nextafter(root, 0), np.nextafter(root, 1), math.sqrt(2), 1.0, 2.0, 0.5, 2.0**-1021]
        )
        tiny, largest = np.finfo(np.float64).tiny, np.finfo(np.float64).max
        for x in (spread, near, borders, np.ldexp(borders[:5], 500), np.array([tiny, largest])):
            found, wanted = functions["log"](x), np.log(x)
            assert np.abs(found - wanted).max() <= 1e-10 * max(1, np.abs(wanted).max())
        # Next to 1, where logarithms of shares are small and divided by beta, the error is relative.
        assert (np.abs(functions["log"](near) - np.log(near)) <= 1e-9 * np.abs(np.log(near))).all()
        assert functions["log"](np.array([1.0]))[0] == 0.0
