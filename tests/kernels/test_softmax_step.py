"""The softmax read of one token on every backend against its definition."""

from typing import Any

import pytest
import torch

from femixer import FreeEnergyMixer
from femixer.kernels import check
from femixer.kernels.softmax_step import OPERATOR, numba_cpu

from .backends import examples


@examples(OPERATOR)
def test_results_are_the_definitions(arguments: tuple[Any, ...], backend: str, dtype: torch.dtype) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < 1e-6, errors  # cached exponentials have been float32


@pytest.mark.parametrize(
    "options",
    [{}, {"prior_options": {"cache": "exp"}}, {"kv_heads": 1}, {"parts": "G"}, {"rope": False}],
    ids=["default", "cached exponentials", "grouped", "mean", "without rope"],
)
def test_every_decoded_token_of_a_mixer_is_one_call_of_the_compiled_kernel(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch computes the same, so that nothing but the speed would show that it took over."""
    calls, step = [], numba_cpu.step
    monkeypatch.setattr(numba_cpu, "step", lambda *args: (calls.append(1), step(*args)))
    mixer, x = FreeEnergyMixer(28, 2, **options), torch.randn(2, 13, 28)
    with torch.no_grad():
        _, state = mixer(x[:, :7], return_state=True)
        for token in x[:, 7:].split(1, 1):
            _, state = mixer(token, state=state, return_state=True)
    assert len(calls) == 6
