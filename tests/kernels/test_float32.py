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
from femixer.kernels.recurrence import OPERATOR as RECURRENCE
from femixer.kernels.recurrence import plain as recurrence
from femixer.kernels.state_space import OPERATOR as STATE_SPACE

OPERATORS = [CONDITIONER, DECAYED_LINEAR, RECURRENCE, STATE_SPACE]
EXAMPLES = [
    pytest.param(operator, arguments, id=f"{operator.name}-{name}")
    for operator in OPERATORS
    for name, arguments in check.definition(operator).examples().items()
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
    assert errors.results < 1e-4, errors
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
