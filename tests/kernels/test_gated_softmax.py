"""The gated softmax read on every backend against its definition."""

from typing import Any

import torch
from matrix import assert_close, noise, stir

from femixer import FreeEnergyMixer, use_backend
from femixer.kernels import check
from femixer.kernels.gated_softmax import OPERATOR

from .backends import examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < (2e-5 if dtype == torch.float32 else 1e-10), errors


def test_a_mixer_may_read_and_gate_at_once_or_one_after_the_other():
    """The same numbers; a backend that has no file for the whole runs its parts."""
    mixer, x = stir(FreeEnergyMixer(64, 2)), noise(3, 71, 64, dtype=torch.float32)
    wanted = mixer(x)
    with use_backend("plain"):
        assert_close({"y": mixer(x)}, {"y": wanted}, 1e-6)
    x = noise(1, 300, 64, dtype=torch.float32)
    with use_backend("numba"):
        in_parts = mixer(x)
    assert_close({"y": in_parts}, {"y": mixer.double()(x.double())}, 1e-5)
