"""Modulation on every backend against its definition."""

import pytest
import torch

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.modulation import OPERATOR, definition, modulation

from .backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_the_matrix_add_up_over_many_tasks(backend: str) -> None:
    x, features, matrix = torch.randn(2, 563, 13), torch.randn(2, 563, 3), torch.randn(13, 3)
    assert check.compare(OPERATOR, backend, (x, features, matrix, 7, [2, 5, 6])).worst < 3e-6


def test_many_features_are_left_to_torch() -> None:
    given, results = (torch.randn(2, 5, 13), torch.randn(2, 5, 11), torch.randn(13, 11)), []
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in given]
        with use_backend(backend):
            y = torch.cat(modulation(*leaves, 7, [2, 5, 6]), -1)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_without_gradients_it_is_the_same(backend: str, tokens: int) -> None:
    arguments = (torch.randn(3, tokens, 7), torch.randn(3, tokens, 5), torch.randn(7, 5), 4, [4, 3])
    with torch.no_grad(), use_backend(backend):
        found = modulation(*arguments)
    for piece, wanted in zip(found, definition(*arguments), strict=True):
        torch.testing.assert_close(piece.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_shows(backend: str, which: int) -> None:
    given = [torch.randn(1, 5, 7), torch.randn(1, 5, 3), torch.randn(7, 3)]
    given[which].view(-1)[0] = torch.nan
    with torch.no_grad(), use_backend(backend):
        first, second = modulation(*given, 4, [4, 3])
    assert first[0, 0, 0].isnan()
    assert second[0, 4, 2].isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_projection_is_not_kept_for_the_gradients(backend: str) -> None:
    """Its results are, once, and from them it is had back."""
    x, features, matrix = (torch.randn(*shape).requires_grad_() for shape in ((2, 37, 23), (2, 37, 3), (23, 3)))
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), use_backend(backend):
        modulation(x, features, matrix, 15, [8, 7, 8])
    assert sum(kept.values()) == x.nbytes + features.nbytes + matrix.nbytes
    assert x.untyped_storage().data_ptr() not in kept


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_kept_may_come_back_as_copies(backend: str) -> None:
    """As from hooks that keep saved tensors elsewhere."""
    x, features, matrix = (torch.randn(*shape).requires_grad_() for shape in ((2, 37, 23), (2, 37, 3), (23, 3)))
    gradients = []
    for keep in (lambda t: t, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), use_backend(backend):
            pieces = modulation(x, features, matrix, 15, [8, 7, 8])
        gradients.append(torch.autograd.grad(sum(p.square().sum() for p in pieces), (x, features, matrix)))
    assert all(map(torch.equal, *gradients))
