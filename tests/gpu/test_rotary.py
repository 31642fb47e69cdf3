"""Rotary positions and their angles in Triton's interpreter against their definitions."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.gates import gated
from femixer.kernels.rotary import OPERATOR, rotate
from femixer.kernels.rotary_angles import OPERATOR as ANGLES
from femixer.kernels.rotary_angles import rotary_angles
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_rotations_and_their_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    q, k, cos, sin, floor = arguments  # angles are float32 whatever the heads are
    assert_as_defined(OPERATOR, (q, k, cos.float(), sin.float(), floor), torch.float32)


@pytest.mark.parametrize("floor", [None, 1e-6])
def test_half_precision_is_rounded_once(floor: float | None) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 67, 3, 64).half(), torch.randn(2, 67, 1, 64).half()
    position = torch.arange(67)[None]
    q.requires_grad_()
    with use_backend("triton"):
        cos, sin = rotary_angles(position, 64, 10000.0, torch.float32)
        found = rotate(q, k, cos, sin, floor)
    wanted = check.page(OPERATOR).definition(q, k, cos, sin, floor)
    for y, x in zip(found, wanted, strict=True):
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.double(), x, rtol=2**-10, atol=1e-6)
    grad = torch.randn_like(q)
    (to_q,), (wanted_q,) = (torch.autograd.grad(y, q, grad.to(y.dtype)) for y in (found[0], wanted[0]))
    assert to_q.dtype == torch.float16
    torch.testing.assert_close(to_q, wanted_q, rtol=2**-9, atol=1e-5)


def test_another_operator_keeps_what_was_rotated_and_rotates_it_again() -> None:
    """Queries and keys are kept before their rotation anyway, by what made them."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 5, 3, 4, requires_grad=True) for _ in range(2)]
    cos, sin = torch.randn(2, 1, 5, 2)
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for backend in ("triton", "plain"):
        kept: set[int] = set()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.add(x.data_ptr()) or x, lambda x: x)
        with use_backend(backend), hooks:
            q, k = rotate(*leaves, cos, sin)
            read = gated(q, None, None, k, 1e-6)
            found[backend] = torch.autograd.grad(read, leaves, torch.ones_like(read))
        if backend == "triton":
            assert kept == {x.data_ptr() for x in (*leaves, cos, sin)}
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@examples(ANGLES)
def test_angles_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    errors = check.compare(ANGLES, "triton", arguments)
    assert errors.worst < 5e-7, errors


def test_angles_of_any_position() -> None:
    """By digits of the position: close to a step from one digit to the next, and up to four of them."""
    position = torch.tensor([[0, 1, 255, 256, 257, 65_535, 65_536, 16_777_215, 16_777_217, 4_000_000_007]])
    errors = check.compare(ANGLES, "triton", (position, 128, 500_000.0, torch.float32))
    assert errors.worst < 1e-6, errors


@pytest.mark.parametrize("length", [1, 70_001])
@pytest.mark.parametrize("floor", [None, 1e-6])
def test_one_launch_for_queries_and_keys_where_they_lie(length: int, floor: float | None) -> None:
    columns = torch.empty(2, length, 10 * 64, device="meta", requires_grad=True)
    q, k = (x.unflatten(-1, (-1, 64)) for x in columns.split([8 * 64, 2 * 64], -1))
    position = torch.arange(length, device="meta")[None]
    with use_backend("triton"), recorded() as launches:
        cos, sin = rotary_angles(position, 64, 10000.0, torch.float32)
        results = rotate(q, k, cos, sin, floor)
        torch.autograd.grad(results, [q, k], [torch.empty_like(y) for y in results])
    assert [launch.name for launch in launches] == ["_forward", "_rotate", "_rotate"]
    heads, angles = 4 * columns.numel(), 2 * 4 * 32 * length
    assert launches[1].bytes == 2 * heads + angles
    assert launches[2].bytes == (2 if floor is None else 3) * heads + angles
