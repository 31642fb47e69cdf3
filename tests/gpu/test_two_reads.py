"""Two reads as one in Triton's interpreter against its definition."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.triton_launch import recorded
from femixer.kernels.two_reads import OPERATOR, triton_gpu

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_gpu, "ELEMENTS", 32)  # several programs, the last of them not full
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize("length", [1, 70_001])
def test_one_launch_each_way_and_one_sum(length: int) -> None:
    reads = [torch.empty(2, length, 8, 64, device="meta", requires_grad=True) for _ in range(6)]
    beta = torch.empty(8, 64, device="meta", requires_grad=True)
    with use_backend("triton"), recorded() as launches:
        mean, free, _ = OPERATOR(*reads, beta)
        (mean.sum() + free.sum()).backward()
    assert [launch.name for launch in launches] == ["_forward", "_backward"]
