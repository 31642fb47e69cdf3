"""The conditioner's features on every backend against their definition."""

import pytest
import torch

from femixer import use_backend
from femixer.kernels.conditioner import OPERATOR, condition, definition
from femixer.kernels.marks import PADDING

from .backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_has_no_gradient(backend: str, used: int) -> None:
    y, initial = torch.randn(2, 13, 9), torch.randn(2, 3)
    gradients = []
    for function in (OPERATOR, definition):
        leaves = [y.clone().requires_grad_(), initial.clone().requires_grad_()]
        with use_backend(backend):
            result = function(leaves[0], None, leaves[1], True, 1e-5)[used]
        gradients.append(torch.autograd.grad(result.square().sum(), leaves))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_it_is_the_same(backend: str) -> None:
    y = torch.randn(2, 7, 15)
    with use_backend(backend), torch.no_grad():
        whole, last = condition(y, None, None, True, 1e-5)
        state, rows = None, []
        for token in y.split(1, 1):
            row, state = condition(token, None, state, True, 1e-5)
            rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_at_padding_does_not_matter(backend: str, causal: bool) -> None:
    y, marks = torch.randn(2, 23, 9), torch.zeros(2, 23, dtype=torch.int8)
    marks[:, [0, 5, 6, 22]] = PADDING
    changed = torch.where((marks == PADDING)[..., None], 1e4, y)
    with use_backend(backend):
        (one, last), (other, other_last) = (condition(x, marks, None, causal, 1e-5) for x in (y, changed))
    assert torch.equal(one[marks == 0], other[marks == 0])
    assert torch.equal(last, other_last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_keeps_nothing_else_in_memory(backend: str) -> None:
    with use_backend(backend), torch.no_grad():
        _, last = condition(torch.randn(2, 100, 9), None, None, True, 1e-5)
    assert last.untyped_storage().nbytes() == last.nbytes
