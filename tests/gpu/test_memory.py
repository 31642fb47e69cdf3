"""The watch over memory that all tests here stand under (conftest.py) finds what a GPU would not forgive."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from femixer.kernels import check, dispatch
from femixer.kernels.operator import Operator
from femixer.kernels.triton_launch import launch

N = 8


@triton.jit
def copy(X, Y, count, step, SHIFT: tl.constexpr, N: tl.constexpr):
    """Y[i step] = X[i step + SHIFT] + i."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(X + i * step + SHIFT, mask=i < count, other=0)
    tl.store(Y + i * step, x + i, mask=i < count)


@triton.jit
def handed_on(X, Y, BARRIER: tl.constexpr, N: tl.constexpr):
    """Y = X, through memory of which other threads read what some wrote."""
    i = tl.arange(0, N)
    tl.store(Y + i, tl.load(X + i))
    if BARRIER:
        tl.debug_barrier()
    x = tl.load(Y + N - 1 - i)
    tl.debug_barrier()
    tl.store(Y + N - 1 - i, x)


@triton.jit
def counted(TOTAL, BY_ADDING: tl.constexpr):
    if BY_ADDING:
        tl.atomic_add(TOTAL, 1.0)
    else:
        tl.store(TOTAL, tl.load(TOTAL) + 1)


def test_numbers_that_a_tensor_does_not_have() -> None:
    whole = torch.zeros(2, 3 * N)
    x, y = whole[:, N : 2 * N], torch.empty(2 * N)
    launch(copy, (1,), x, y, N, 1, SHIFT=0, N=N)
    with pytest.raises(InterpreterError, match="copy reads 1 numbers that its tensors do not have"):
        launch(copy, (1,), x, y, N, 1, SHIFT=1, N=N)
    with pytest.raises(InterpreterError, match="copy reads 1 numbers that"):
        launch(copy, (1,), x, y, N, 1, SHIFT=-1, N=N)
    launch(copy, (1,), y, y, N, 2, SHIFT=1, N=N)
    with pytest.raises(InterpreterError, match=r"copy reads \d+ numbers that"):
        launch(copy, (1,), whole[0, ::2], y, N, 1, SHIFT=1, N=N)


def test_programs_that_touch_each_others_numbers() -> None:
    x = torch.zeros(2 * N)
    launch(copy, (2,), x, x, 2 * N, 1, SHIFT=0, N=N, num_warps=1)
    with pytest.raises(InterpreterError, match="copy writes what another program touches"):
        launch(copy, (2,), torch.zeros(4 * N), x, 2 * N, 0, SHIFT=0, N=N, num_warps=1)
    total = torch.zeros(1)
    launch(counted, (3,), total, BY_ADDING=True)
    assert total == 3
    with pytest.raises(InterpreterError, match="counted reads what another program touches"):
        launch(counted, (3,), total, BY_ADDING=False, num_warps=1)


def test_threads_that_do_not_wait() -> None:
    x, y = torch.arange(float(N)), torch.empty(N)
    launch(handed_on, (1,), x, y, BARRIER=True, N=N)
    assert torch.equal(x, y)
    with pytest.raises(InterpreterError, match="handed_on reads what it wrote, without a barrier"):
        launch(handed_on, (1,), x, y, BARRIER=False, N=N)
    # Four warps hold copies of few numbers: one may read after another has written.
    with pytest.raises(InterpreterError, match="copy writes what it read, without a barrier"):
        launch(copy, (1,), x, x, N, 1, SHIFT=0, N=N, num_warps=4)
    with pytest.raises(InterpreterError, match="copy writes what it read, without a barrier"):
        launch(copy, (1,), x, x, N - 1, 1, SHIFT=1, N=N, num_warps=1)


def test_memory_that_nobody_wrote() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all() and torch.zeros(2).new_empty(3).isnan().all()


# Those that read what lies apart; state spaces copy it first. Numbers that an example has at least.
OPERATORS = [each for each in check.find_operators("femixer.kernels") if each.implementation("triton")]
OPERATORS = [each for each in OPERATORS if "state_space" not in each.name]
ENOUGH = 500


def apart(x: Any) -> Any:
    """With other numbers between its rows and behind the last one, as columns of a projection lie."""
    if not isinstance(x, torch.Tensor) or x.dim() < 3:
        return x
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 77, dtype=x.dtype)
    wide[..., 3:-2] = x
    return wide[..., 3:-2]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_arguments_that_lie_apart(operator: Operator, memory: list[str]) -> None:
    """The smallest example of some size with the most tensors, none contiguous: what lies between is not touched."""
    examples = check.page(operator).examples().values()
    served = [each for each in examples if dispatch.refusal(operator, "triton", each) is None]

    def order(arguments: tuple[Any, ...]) -> tuple[bool, int, int]:
        sizes = [x.numel() for x in arguments if isinstance(x, torch.Tensor)]
        return sum(sizes) > ENOUGH, len(sizes), -sum(sizes)

    for each in sorted(served, key=order, reverse=True):
        moved = tuple(map(apart, each))
        given = moved if dispatch.refusal(operator, "triton", moved) is None else each
        errors, allowed = check.compare(operator, "triton", given), check.tolerance(operator, torch.float32)
        assert errors.results <= allowed.results, errors
        assert max(errors.gradients.values(), default=0) <= allowed.gradients, errors
        if memory:  # some examples are left to torch, and some have no token
            return
    pytest.fail(f"no example of {operator.name} runs a kernel")
