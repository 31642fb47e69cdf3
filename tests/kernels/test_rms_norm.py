"""The RMS norm on every backend against its definition."""

import pytest
import torch

from femixer.kernels import check
from femixer.kernels.rms_norm import OPERATOR, rms_norm

from .backends import BACKENDS


@pytest.mark.parametrize("shape", [(1031, 3), (3, 1, 7, 5), (8,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_rows_and_axes(shape: tuple[int, ...], backend: str) -> None:
    """1031 rows are more than one task sums up in the gradient of the weight."""
    torch.manual_seed(0)
    arguments = torch.randn(shape), torch.randn(shape[-1]), 1e-5
    errors = check.compare(OPERATOR, backend, arguments, torch.float32)
    assert errors.worst < 3e-6, errors


def test_autocast_does_not_lower_its_precision() -> None:
    x, weight = torch.randn(3, 7), torch.randn(7)
    with torch.autocast("cpu", torch.bfloat16):
        low = rms_norm(x, weight, 1e-6)
    assert torch.equal(low, rms_norm(x, weight, 1e-6))
