"""What tests of operators share: every example of an operator on every backend that serves it, in every float type."""

import pytest
import torch

from femixer.kernels import check, dispatch
from femixer.kernels.operator import Operator

BACKENDS = ("plain", "numba")
FLOATS = (torch.float32, torch.float64)


def examples(operator: Operator) -> pytest.MarkDecorator:
    """Parametrize a test with (arguments, backend, dtype). Plain torch serves everything; what another backend refuses,
    it refuses with a reason."""
    found = []
    for name, arguments in check.page(operator).examples().items():
        for backend in BACKENDS:
            for dtype in FLOATS:
                given = check.cast(arguments, dtype)
                why = dispatch.refusal(operator, backend, given)
                assert why is None or backend != "plain", why
                if why is None:
                    found.append(pytest.param(given, backend, dtype, id=f"{name}-{backend}-{str(dtype)[6:]}"))
    return pytest.mark.parametrize(("arguments", "backend", "dtype"), found)
