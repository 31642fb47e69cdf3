"""The linear recurrence on every backend against its definition."""

import pytest
import torch

from femixer import use_backend
from femixer.kernels.recurrence import definition, linear_recurrence

from .backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_input_changes_no_earlier_result(backend: str) -> None:
    torch.manual_seed(0)
    decay, inputs, initial = torch.rand(1, 301, 3) ** 0.1, torch.randn(1, 301, 3), torch.randn(1, 3)
    with use_backend(backend):
        before = linear_recurrence(decay, inputs, initial)
        inputs[:, 207] *= 1e30
        after = linear_recurrence(decay, inputs, initial)
    assert torch.equal(before[:, :207], after[:, :207])
    assert not torch.equal(before[:, 207:], after[:, 207:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_continued_from_the_last_state_it_is_the_whole(backend: str) -> None:
    torch.manual_seed(0)
    decay, inputs, initial = torch.rand(2, 67, 5), torch.randn(2, 67, 5), torch.randn(2, 5)
    with use_backend(backend):
        whole = linear_recurrence(decay, inputs, initial)
        first = linear_recurrence(decay[:, :31], inputs[:, :31], initial)
        second = linear_recurrence(decay[:, 31:], inputs[:, 31:], first[:, -1])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decay_of_zero_leaves_exactly_nothing(backend: str) -> None:
    torch.manual_seed(0)
    decay, inputs, initial = torch.rand(1, 67, 3), torch.randn(1, 67, 3).requires_grad_(), torch.randn(1, 3)
    decay[:, 41] = 0
    with use_backend(backend):
        (gradient,) = torch.autograd.grad(linear_recurrence(decay, inputs, initial)[:, 41:].sum(), inputs)
    assert (gradient[:, :41] == 0).all()
    assert (gradient[:, 41:] != 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_at_16384_tokens(backend: str) -> None:
    """Spans from 2 to 1000 tokens, in float32, with gradients; a plain float32 loop has 7e-7 here."""
    length, spans = 16384, torch.logspace(0.3, 3, 5, dtype=torch.float64)
    decay = (-1 / spans).exp().expand(1, length, 5).float().contiguous()
    inputs, initial = torch.randn(1, length, 5).requires_grad_(), torch.zeros(1, 5)
    with use_backend(backend):
        h = linear_recurrence(decay, inputs, initial)
    (wanted,) = definition(decay, inputs.detach(), initial, False)
    assert ((h - wanted).abs().amax(1) <= 3e-6 * wanted.abs().amax(1)).all()
    # The gradient of inputs is the same recurrence backwards: sum_t decay^(t - i).
    (gradient,) = torch.autograd.grad(h.sum(), inputs)
    (backwards,) = definition(decay.flip(1), torch.ones(1, length, 5), initial, False)
    assert ((gradient - backwards.flip(1)).abs().amax(1) <= 3e-6 * backwards.abs().amax(1)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_is_remembered_exactly_as_long_as_its_decays_say(backend: str) -> None:
    """An exponential of a cumulative sum, or a quotient of two, forgets everything after about 40 tokens."""
    length = 2000
    decay = 0.7 + 0.3 * torch.randn(1, length, 4).sigmoid()
    inputs = torch.zeros(1, length, 4)
    inputs[:, 0] = 1
    with use_backend(backend):
        h = linear_recurrence(decay, inputs, torch.zeros(1, 4)).double()
    wanted = decay.double()[:, 1:].cumprod(1)
    visible = wanted > 1e-30
    assert visible.sum() > 400
    assert ((h[:, 1:] / wanted - 1).abs()[visible] < 1e-4).all()
