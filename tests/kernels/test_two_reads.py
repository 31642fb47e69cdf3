"""Two reads as one on every backend against its definition."""

from typing import Any

import torch

from femixer.kernels import check
from femixer.kernels.two_reads import OPERATOR

from .backends import examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < (2e-6 if dtype == torch.float32 else 1e-9), errors
