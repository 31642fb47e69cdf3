"""Mixers without compiled kernels: in plain torch by request, and in a process that was forked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import SEGMENTS, Variant, _variants, assert_close, outcome, streamed, tokens
from torch import Tensor

from femixer import use_backend
from femixer.kernels.dispatch import unavailable
from femixer.priors import PRIORS
from femixer.priors.base import DirectedPrior

VARIANTS = [v for name, kind in PRIORS.items() if issubclass(kind, DirectedPrior) for v in _variants(name)]
EVERY_VARIANT = pytest.mark.parametrize("variant", [pytest.param(v, id=f"{v.prior}-{v.name}") for v in VARIANTS])


def ways(m: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    found = {"eager": m, "segments": lambda x: m(x, segments=SEGMENTS)}
    if m.causal:
        found["stream"] = lambda x: streamed(m, x, [1, 4, 16, 1, 1])
    return found


class TestWithoutNumba:
    @EVERY_VARIANT
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_mixer_computes_the_same(self, variant: Variant, causal: bool):
        m, x = variant.build(causal=causal), tokens()
        wanted = {name: outcome(m, way, x) for name, way in ways(m).items()}
        with use_backend("plain"):
            for name, way in ways(m).items():
                assert_close(outcome(m, way, x), wanted[name], 1e-10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
class TestFork:
    def test_a_child_takes_the_plain_way_and_computes_the_same(self):
        mixers = [variant.build() for variant in VARIANTS if variant.name == "CLTG"]
        x = tokens()
        with torch.no_grad():
            wanted = [m(x) for m in mixers]
        assert unavailable("numba") is None

        def child() -> bool:
            with torch.no_grad():
                same = all(torch.allclose(m(x), y, atol=1e-10) for m, y in zip(mixers, wanted, strict=True))
            return same and "forked" in str(unavailable("numba"))

        assert in_child(child)
        assert unavailable("numba") is None


def in_child(function: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether function returns True in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} seconds")
