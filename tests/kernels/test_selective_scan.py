"""The selective scan of the baselines on every backend against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.baselines.kernels.selective_scan import OPERATOR, selective_scan
from femixer.kernels import check

from .backends import BACKENDS, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < (2e-6 if dtype == torch.float32 else 1e-12), errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_is_all_at_once(backend: str) -> None:
    *given, marks, state = check.page(OPERATOR).examples()["with marks and state"]
    with use_backend(backend), torch.no_grad():
        whole, last = selective_scan(*given, marks, state)
        rows = []
        for t in range(marks.shape[1]):
            y, state = selective_scan(given[0], *(x[:, t : t + 1] for x in given[1:]), marks[:, t : t + 1], state)
            rows.append(y)
    torch.testing.assert_close((torch.cat(rows, 1), state), (whole, last), rtol=1e-5, atol=1e-5)


def test_compiled_without_a_break() -> None:
    *given, marks, _ = check.page(OPERATOR).examples()["with marks and state"]
    given = [x.requires_grad_() for x in given]
    compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, selective_scan):
        y, last = run(*given, marks, None)
        results.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), given)])
    torch.testing.assert_close(*results)
