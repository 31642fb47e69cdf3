"""The gates of a read in Triton's interpreter against their definition."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.gates import gated_read
from femixer.kernels import check
from femixer.kernels.gates import OPERATOR
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples

READS = {name: x[:4] for name, x in check.page(OPERATOR).examples().items()}


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize("which", range(4))
def test_what_is_not_a_number_propagates(which: int) -> None:
    given = list(READS["width 33"])
    given[which] = given[which].clone()
    given[which][1, 2, 0, 3] = torch.nan
    with use_backend("triton"), torch.no_grad():
        read = gated_read(*given)
    assert read[1, 2, 0, 3].isnan()
    assert torch.isfinite(read[0]).all()


@pytest.mark.parametrize("length", [1, 70_001])
def test_one_launch_each_way_reads_logits_where_they_lie(length: int) -> None:
    """Logits are columns of a projection; nothing is copied."""
    projected = torch.empty(2, length, 2 * 8 * 64, device="meta", requires_grad=True)
    mean, free = (torch.empty(2, length, 8, 64, device="meta", requires_grad=True) for _ in range(2))
    lam, gate = (part.unflatten(-1, (8, 64)) for part in projected.chunk(2, -1))
    with use_backend("triton"), recorded() as launches:
        read = gated_read(mean, free, lam, gate)
        torch.autograd.grad(read, [mean, free, lam, gate], torch.empty_like(read))
    assert [launch.name for launch in launches] == ["_forward", "_backward"]
    assert [launch.bytes for launch in launches] == [5 * 4 * mean.numel(), 9 * 4 * mean.numel()]
