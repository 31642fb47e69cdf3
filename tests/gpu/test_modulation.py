"""Modulation in Triton's interpreter against its definition."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels.modulation import OPERATOR, modulation, triton_gpu
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize("programs", [1, 512])
def test_pieces_that_end_within_a_tile(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns, of rows and of groups of rows; with four pieces, the last of them added to."""
    monkeypatch.setattr(triton_gpu, "PROGRAMS", programs)
    torch.manual_seed(0)
    widths = [131, 7, 130, 5]
    x, matrix = torch.randn(2, 37, sum(widths)), torch.randn(sum(widths), 19) / 19
    assert_as_defined(OPERATOR, (x, torch.randn(2, 37, 19), matrix, 268, widths), torch.float32)


@pytest.mark.parametrize(("programs", "repeatable"), [(1, False), (512, False), (512, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_matrix_and_features_are_summed_in_the_kernel(
    programs: int, repeatable: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the features not where results must repeat, because programs add to them in the order they come."""
    monkeypatch.setattr(triton_gpu, "PROGRAMS", programs)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    torch.manual_seed(0)
    widths = [80, 16, 48]
    x, matrix = torch.randn(2, 37, sum(widths)), torch.randn(sum(widths), 19) / 19
    with recorded() as launches:
        assert_as_defined(OPERATOR, (x, torch.randn(2, 37, 19), matrix, 96, widths), dtype)
    assert [launch.name for launch in launches] == ["_forward", "_backward", "_finish"]
    assert launches[1].options["ADDED"] is not repeatable


def test_a_piece_that_nobody_used() -> None:
    x, features, matrix = torch.randn(3, 12, requires_grad=True), torch.randn(3, 5), torch.randn(12, 5)
    with use_backend("triton"):
        (found,) = torch.autograd.grad(modulation(x, features, matrix, 12, [5, 7])[1].sum(), x)
    with use_backend("plain"):
        (wanted,) = torch.autograd.grad(modulation(x, features, matrix, 12, [5, 7])[1].sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("length", [1, 70_001])
def test_one_launch_each_way_and_one_for_the_sums(length: int) -> None:
    x = torch.empty(2, length, 1088, device="meta", requires_grad=True)
    features = torch.empty(2, length, 16, device="meta", requires_grad=True)
    matrix = torch.empty(1088, 16, device="meta", requires_grad=True)
    with use_backend("triton"), recorded() as launches:
        pieces = modulation(x, features, matrix, 1024, [512, 512, 64])
        torch.autograd.grad(pieces, [x, features, matrix], [torch.empty_like(y) for y in pieces])
    assert [launch.name for launch in launches] == ["_forward", "_backward", "_finish"]


def test_what_it_does_not_serve_is_named() -> None:
    x = torch.empty(2, 3, 10)
    assert triton_gpu.refuse(x, x, torch.empty(10, 200), 10, [10]) == "200 features are too many, 128 are the most"
    assert triton_gpu.refuse(x, x, torch.empty(10, 5), 10, [2] * 5) == "5 pieces are too many, 4 are the most"
