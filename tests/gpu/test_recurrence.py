"""The linear recurrence in Triton's interpreter against its definition."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.recurrence import OPERATOR, definition, linear_recurrence, triton_gpu
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize("length", [16, 17, 131])
def test_any_length_and_width(length: int) -> None:
    """A single chunk, one token more, and more channels than a program takes."""
    torch.manual_seed(0)
    given = torch.rand(1, length, 67), torch.randn(1, length, 67), torch.randn(1, 67)
    assert_as_defined(OPERATOR, (*given, True), torch.float32)


def test_a_later_input_changes_no_earlier_result() -> None:
    torch.manual_seed(0)
    decay, inputs, initial = torch.rand(1, 101, 3) ** 0.1, torch.randn(1, 101, 3), torch.randn(1, 3)
    with use_backend("triton"):
        before = linear_recurrence(decay, inputs, initial)
        inputs[:, 57] *= 1e30
        after = linear_recurrence(decay, inputs, initial)
    assert torch.equal(before[:, :57], after[:, :57])
    assert not torch.equal(before[:, 57:], after[:, 57:])


def test_exact_at_16384_tokens() -> None:
    """Spans from 2 to 1000 tokens."""
    torch.manual_seed(0)
    decay = (-1 / torch.logspace(0.3, 3, 5, dtype=torch.float64)).exp().expand(1, 16384, 5).float().contiguous()
    inputs, initial = torch.randn(1, 16384, 5), torch.zeros(1, 5)
    with use_backend("triton"):
        h = linear_recurrence(decay, inputs, initial)
    (wanted,) = definition(decay, inputs, initial, False)
    assert ((h - wanted).abs().amax(1) <= 3e-6 * wanted.abs().amax(1)).all()


def test_columns_of_wider_tensors_are_read_where_they_are() -> None:
    torch.manual_seed(0)
    both, initial = torch.rand(2, 37, 10), torch.zeros(2, 5)
    given = both[..., :5], both[..., 5:], initial
    with use_backend("triton"), recorded() as launches:
        h = linear_recurrence(*given)
    assert launches[0].operands[0].data_ptr() == both.data_ptr()
    torch.testing.assert_close(h.double(), definition(*given, True)[0], atol=1e-6, rtol=1e-5)
    assert_as_defined(OPERATOR, (both.permute(2, 1, 0), both.permute(2, 1, 0), torch.zeros(10, 2), True), torch.float32)


@pytest.mark.parametrize("length", [1024, 65536])
def test_three_launches_each_way(length: int) -> None:
    given = [torch.empty(*shape, device="meta", requires_grad=True) for shape in ((2, length, 48),) * 2 + ((2, 48),)]
    with use_backend("triton"), recorded() as launches:
        h = linear_recurrence(*given)
        h.backward(torch.empty_like(h))
    assert [each.name for each in launches] == [
        "_sums",
        "_over_chunks",
        "_forward",
        "_sums",
        "_over_chunks",
        "_backward",
    ]


def test_what_it_does_not_serve_is_named() -> None:
    x = torch.empty(2, 3, 5)
    assert triton_gpu.refuse(x, x.double(), x[:, 0], True) == (
        "it takes float32, bfloat16 and float16, not torch.float64"
    )
