"""Softplus and the unnormalized read in Triton's interpreter against their definitions."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.softplus import OPERATOR, softplus, triton_gpu
from femixer.kernels.triton_launch import recorded
from femixer.kernels.unnormalized import OPERATOR as UNNORMALIZED
from femixer.kernels.unnormalized import triton_gpu as unnormalized_gpu

from .examples import assert_as_defined, examples


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several tiles of rows each, the last of them not full."""
    for module in (triton_gpu, unnormalized_gpu):
        for name, size in {"ELEMENTS": 16, "WIDEST": 8, "PROGRAMS": 4}.items():
            monkeypatch.setattr(module, name, size)


@examples(OPERATOR)
def test_softplus_is_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@examples(UNNORMALIZED)
def test_an_unnormalized_read_is_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(UNNORMALIZED, arguments, dtype)


@pytest.mark.parametrize("length", [1, 70_001])
def test_one_launch_each_way_reads_logits_where_they_lie(length: int) -> None:
    """Logits are columns of a projection; nothing is copied or widened before."""
    projected = torch.empty(2, length, 96, device="meta", dtype=torch.bfloat16, requires_grad=True)
    logits, bias = projected[..., 16:80].unflatten(-1, (8, 8)), torch.empty(8, 8, device="meta", requires_grad=True)
    with use_backend("triton"), recorded() as launches:
        y = softplus(logits, bias)
        torch.autograd.grad(y, [logits, bias], torch.empty_like(y))
    assert [launch.name for launch in launches] == ["_forward", "_backward"]
    assert y.dtype == torch.float32
    assert launches[0].bytes == (2 + 4) * logits.numel() + 4 * 64
