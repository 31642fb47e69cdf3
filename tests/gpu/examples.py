"""What tests of Triton kernels share: every example of an operator in Triton's interpreter, in float32 and float16.

Products of bfloat16 are wrong in the interpreter, so that type is only compiled (test_compile.py).
"""

from typing import Any

import pytest
import torch

from femixer.kernels import check, dispatch
from femixer.kernels.operator import Operator

FLOATS = (torch.float32, torch.float16)
# Of plain torch's error in half precision; and what rounding the results alone costs.
OF_PLAIN, ROUNDING = 2.0, torch.finfo(torch.float16).eps


def examples(operator: Operator) -> pytest.MarkDecorator:
    """Parametrize a test with (arguments, dtype) of the examples that Triton serves."""
    found = []
    for name, arguments in check.page(operator).examples().items():
        for dtype in FLOATS:
            given = check.cast(arguments, dtype)
            if dispatch.refusal(operator, "triton", given) is None:
                found.append(pytest.param(given, dtype, id=f"{name}-{str(dtype)[6:]}"))
    assert found, f"Triton serves no example of {operator.name}"
    return pytest.mark.parametrize(("arguments", "dtype"), found)


def assert_as_defined(operator: Operator, arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Results and gradients are within the operator's tolerance in float32, and in float16 at most twice as far from
    the definition as plain torch's."""
    errors = check.compare(operator, "triton", arguments, dtype)
    if dtype == torch.float32:
        allowed = check.tolerance(operator, dtype)
        assert errors.results <= allowed.results, errors
        assert all(error <= allowed.gradients for error in errors.gradients.values()), errors
        return
    plain = check.compare(operator, "plain", arguments, dtype)
    assert errors.results <= OF_PLAIN * plain.results + ROUNDING, (errors, plain)
    for name, error in errors.gradients.items():
        assert error <= OF_PLAIN * plain.gradients[name] + ROUNDING, (name, errors, plain)
