"""Plain torch as it runs off a CPU, where scans have float32 instead of float64, tried on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from femixer import use_backend
from femixer.kernels import check, reading
from femixer.kernels.conditioner import OPERATOR as CONDITIONER
from femixer.kernels.decayed_linear import OPERATOR as DECAYED_LINEAR
from femixer.kernels.operator import Operator
from femixer.kernels.pair_state_space import OPERATOR as PAIR_STATE_SPACE
from femixer.kernels.recurrence import OPERATOR as RECURRENCE
from femixer.kernels.recurrence import plain as recurrence
from femixer.kernels.state_space import OPERATOR as STATE_SPACE

OPERATORS = [CONDITIONER, DECAYED_LINEAR, PAIR_STATE_SPACE, RECURRENCE, STATE_SPACE]
EXAMPLES = [
    pytest.param(operator, arguments, id=f"{operator.name}-{name}")
    for operator in OPERATORS
    for name, arguments in check.page(operator).examples().items()
]


class WithoutFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = function(*args, **(kwargs or {}))
        assert not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(results)), function
        return results


@pytest.fixture(autouse=True)
def as_off_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FLOAT64", ())


def in_float32(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.detach().float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


@pytest.mark.parametrize(("operator", "arguments"), EXAMPLES)
def test_float32_is_the_definition_to_fewer_digits(operator: Operator, arguments: tuple[Any, ...]) -> None:
    """The state's top, and with it its sums, have the digits of the longest decay; everything else has more."""
    errors = check.compare(operator, "plain", in_float32(arguments), torch.float32)
    assert errors.results < (2e-4 if operator is PAIR_STATE_SPACE else 1e-4), errors
    assert errors.worst < 1e-3, errors


@pytest.mark.parametrize(("operator", "arguments"), EXAMPLES)
def test_nothing_is_computed_in_float64(operator: Operator, arguments: tuple[Any, ...]) -> None:
    given = [
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in in_float32(arguments)
    ]
    with WithoutFloat64(), use_backend("plain"):
        results = [x for x in operator(*given) if x.requires_grad]
        torch.autograd.grad(results, [given[0]], [torch.ones_like(x) for x in results], allow_unused=True)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 129])
@pytest.mark.parametrize("numbers", [0, 2**23], ids=["by halves", "pairs"])
def test_recurrences_in_place_and_by_pairs_are_one(length: int, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "NUMBERS", numbers)
    torch.manual_seed(length)
    gates, x, initial = -torch.rand(2, length, 3), torch.randn(2, length, 3), torch.randn(2, 3)
    wanted, h = [], initial.double()
    for gate, now in zip(gates.double().unbind(1), x.double().unbind(1), strict=True):
        h = gate.exp() * h + now
        wanted.append(h)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = recurrence.scan(gates, x, initial)
        torch.testing.assert_close(found.double(), torch.stack(wanted, 1), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("operator", [PAIR_STATE_SPACE, STATE_SPACE], ids=lambda operator: operator.name)
def test_beyond_the_range_of_float32_reads_and_gradients_are_finite(operator: Operator) -> None:
    """Modes take turns at decaying slowly, so that sums of exponentials fall far below the largest one as it decays."""
    torch.manual_seed(0)
    batch, length, heads, modes, width = 1, 211, 2, 5, 3
    write, read = torch.rand(2, batch, length, modes)
    v, nothing = 300 * torch.randn(batch, length, heads, width), torch.full((batch, heads), -torch.inf)
    if operator is PAIR_STATE_SPACE:
        gate, spread = -20 * torch.rand(batch, length, heads, modes), torch.rand(heads, modes, width)
        system, sums = (gate, write, read, spread, spread.mT), torch.zeros(batch, 3, heads, modes)
        given = [*system, v, torch.ones(heads), None, sums, nothing, False]
    else:
        # A step of a token is shared by its modes: what a row reads fades with those that it does not read.
        read = read * (torch.arange(modes) > 2)
        step, rate = torch.rand(batch, length, heads), -torch.arange(1.0, modes + 1)[:, None].expand(-1, heads)
        sums = torch.zeros(batch, 3, modes, heads)
        given = [rate, step, write, read, None, None, v[..., 0], torch.ones(heads), None, sums, nothing, False]
    given = [x.contiguous().requires_grad_() if isinstance(x, Tensor) else x for x in given]
    with use_backend("plain"):
        mean, free = operator(*given)[:2]
        found = torch.autograd.grad((mean + free).sum(), [x for x in given if isinstance(x, Tensor)], allow_unused=True)
    assert (mean <= free).all()
    assert (free <= given[5 if operator is PAIR_STATE_SPACE else 6].max() * (1 + 1e-6)).all()
    assert all(g is None or g.isfinite().all() for g in found)
