"""The RMS norm in Triton's interpreter against its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.rms_norm import OPERATOR, rms_norm, triton_gpu
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize("shape", [(1031, 3), (3, 1, 7, 5), (8,), (67, 257)])
def test_any_number_of_rows_and_axes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than programs, so that one sums the weight's gradient over several tiles."""
    monkeypatch.setattr(triton_gpu, "PROGRAMS", 3)
    torch.manual_seed(0)
    assert_as_defined(OPERATOR, (torch.randn(shape), torch.randn(shape[-1]), 1e-5), torch.float32)


def test_columns_of_a_wider_tensor() -> None:
    torch.manual_seed(0)
    assert_as_defined(OPERATOR, (torch.randn(5, 13, 11)[..., 2:9], torch.randn(7), 1e-5), torch.float32)


@pytest.mark.parametrize("length", [7, 70_001])
def test_one_launch_each_way_and_one_sum(length: int) -> None:
    x, weight = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((2, length, 512), (512,)))
    with use_backend("triton"), recorded() as launches:
        y = rms_norm(x, weight, 1e-5)
        y.backward(torch.empty_like(y))
    assert [launch.name for launch in launches] == ["_forward", "_backward"]


def test_what_it_does_not_serve_is_named() -> None:
    wide = torch.empty(3, 20_000)
    assert "20000 channels are too wide" in str(triton_gpu.refuse(wide, wide[0], 1e-6))
    assert "not torch.float64" in str(triton_gpu.refuse(wide.double(), wide[0], 1e-6))


@pytest.mark.parametrize("spread", [lambda x: x[:, -1:], lambda x: x[..., ::2], lambda x: x.mT])
def test_rows_may_lie_anywhere_and_gradients_be_one_number(spread: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, requires_grad=True)
    given = spread(x)
    weight = torch.randn(given.shape[-1])
    with use_backend("triton"):
        y = rms_norm(given, weight, 1e-5)
        (found,) = torch.autograd.grad(y.sum(), x)
    wanted = torch.nn.functional.rms_norm(given, weight.shape, weight, 1e-5)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.sum(), x)[0])
