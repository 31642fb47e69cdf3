"""Elementwise operators that are left to torch on a CPU, softplus and the unnormalized read, against definitions."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.operator import Operator
from femixer.kernels.softplus import OPERATOR, softplus
from femixer.kernels.unnormalized import OPERATOR as UNNORMALIZED

EXAMPLES = {
    f"{operator.name}, {name}": (operator, arguments)
    for operator in (OPERATOR, UNNORMALIZED)
    for name, arguments in check.page(operator).examples().items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("operator", "arguments"), EXAMPLES.values(), ids=EXAMPLES)
def test_results_and_gradients_are_the_definitions(
    operator: Operator, arguments: tuple[Any, ...], dtype: torch.dtype
) -> None:
    # torch's softplus(x) is x above 20, where it is off by up to 2e-9.
    errors = check.compare(operator, "plain", arguments, dtype)
    assert errors.worst < (1e-6 if dtype == torch.float32 else 1e-8), errors


def test_logits_of_half_precision_lose_no_more_digits() -> None:
    x, bias = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5)
    with use_backend("plain"):
        assert torch.equal(softplus(x, bias, -1.0), softplus(x.float(), bias, -1.0))
