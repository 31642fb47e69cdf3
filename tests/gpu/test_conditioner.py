"""The conditioner's features in Triton's interpreter against their definition."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.conditioner import OPERATOR, condition, definition, triton_gpu
from femixer.kernels.marks import PADDING
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize(("length", "channels"), [(2, 131), (8, 4), (9, 17), (67, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_any_length_and_width(length: int, channels: int, causal: bool) -> None:
    """A single chunk, one token more, and more channels than elements of a program."""
    torch.manual_seed(0)
    given = torch.randn(2, length, 3 * channels), None, torch.randn(2, channels)
    assert_as_defined(OPERATOR, (*given, causal, 1e-5), torch.float32)


def test_small_directions_keep_their_digits() -> None:
    """softplus(a) of 1e-9 and less, whose length is divided out."""
    torch.manual_seed(0)
    y = torch.randn(1, 5, 9)
    y[..., 6:] -= 20
    assert_as_defined(OPERATOR, (y, None, None, True, 1e-5), torch.float32)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_has_no_gradient(used: int) -> None:
    torch.manual_seed(0)
    y, initial = torch.randn(2, 13, 9), torch.randn(2, 3)
    gradients = []
    for function in (OPERATOR, definition):
        leaves = [y.clone().requires_grad_(), initial.clone().requires_grad_()]
        with use_backend("triton"):
            result = function(leaves[0], None, leaves[1], True, 1e-5)[used]
        gradients.append(torch.autograd.grad(result.square().sum(), leaves))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_token_by_token_it_is_the_same() -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 11, 15)
    with use_backend("triton"), torch.no_grad():
        whole, last = condition(y, None, None, True, 1e-5)
        state, rows = None, []
        for token in y.split(1, 1):
            row, state = condition(token, None, state, True, 1e-5)
            rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_at_padding_does_not_matter(causal: bool) -> None:
    torch.manual_seed(0)
    y, marks = torch.randn(2, 23, 9), torch.zeros(2, 23, dtype=torch.int8)
    marks[:, [0, 5, 6, 22]] = PADDING
    changed = torch.where((marks == PADDING)[..., None], 1e4, y)
    with use_backend("triton"):
        (one, last), (other, other_last) = (condition(x, marks, None, causal, 1e-5) for x in (y, changed))
    assert torch.equal(one[marks == 0], other[marks == 0])
    assert torch.equal(last, other_last)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1024, 65536])
def test_three_launches_each_way(length: int, causal: bool) -> None:
    """What is kept besides y does not outweigh the features."""
    y = torch.empty(2, length, 48, device="meta", requires_grad=True)
    with use_backend("triton"), recorded() as launches:
        features, _, kept = OPERATOR(y, None, None, causal, 1e-5)
        features.backward(torch.empty_like(features))
    forwards, back = ["summarise", "carry", "features"], ["through_features", "carry", "through_sums"]
    assert [each.name for each in launches] == forwards + back
    assert kept.nbytes <= features.nbytes / 2


def test_compiled_it_is_the_same_and_another_length_is_not_compiled_anew() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda y: condition(y, None, None, True, 1e-5)[0], fullgraph=True, backend="aot_eager")
    with use_backend("triton"), torch.no_grad():
        for length in (17, 19, 23, 67):
            y = torch.randn(1, length, 9)
            torch.testing.assert_close(compiled(y), condition(y, None, None, True, 1e-5)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the first length, and any


def test_one_launch_for_a_token() -> None:
    with use_backend("triton"), recorded() as launches, torch.no_grad():
        condition(torch.empty(3, 1, 48, device="meta"), None, torch.empty(3, 16, device="meta"), True, 1e-5)
    assert [each.name for each in launches] == ["features"]


def test_what_it_does_not_serve_is_named() -> None:
    y = torch.empty(2, 3, 900)
    assert triton_gpu.refuse(y, None, None, True, 1e-5) == "300 channels are too many, 256 are the most"
    assert "not torch.float64" in str(triton_gpu.refuse(y[..., :9].double(), None, None, True, 1e-5))
