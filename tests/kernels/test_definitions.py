"""Scans, rotations, norms and gates against their definitions: all examples, on every backend, in every float type."""

from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.baselines.kernels.linear_attention import OPERATOR as LINEAR_ATTENTION
from femixer.baselines.kernels.selective_scan import OPERATOR as SELECTIVE_SCAN
from femixer.baselines.kernels.selective_scan import selective_scan
from femixer.kernels import check
from femixer.kernels.channel_scan import OPERATOR as CHANNEL_SCAN
from femixer.kernels.conditioner import OPERATOR as CONDITIONER
from femixer.kernels.gates import OPERATOR as GATES
from femixer.kernels.modulation import OPERATOR as MODULATION
from femixer.kernels.operator import Operator
from femixer.kernels.pair_state_space import OPERATOR as PAIR_STATE_SPACE
from femixer.kernels.recurrence import OPERATOR as RECURRENCE
from femixer.kernels.rms_norm import OPERATOR as RMS_NORM
from femixer.kernels.rotary import OPERATOR as ROTARY
from femixer.kernels.softplus import OPERATOR as SOFTPLUS
from femixer.kernels.softplus import softplus
from femixer.kernels.unnormalized import OPERATOR as UNNORMALIZED

from .backends import BACKENDS, examples

# The largest error of results and gradients in float32 and in float64, relative to the largest number. Also see
# test_state_space.py, whose gradients have an error of their own.
LARGEST_ERRORS = {
    CHANNEL_SCAN: (1e-5, 1e-9),
    CONDITIONER: (3e-6, 1e-12),
    GATES: (5e-6, 1e-9),  # torch's softplus(x) is x above 20, where it is off by up to 2e-9
    LINEAR_ATTENTION: (5e-6, 1e-12),
    MODULATION: (3e-6, 1e-13),
    PAIR_STATE_SPACE: (1e-6, 1e-12),
    RECURRENCE: (2e-6, 1e-12),
    RMS_NORM: (1e-6, 1e-13),
    ROTARY: (1e-6, 1e-14),
    SELECTIVE_SCAN: (2e-6, 1e-12),
    SOFTPLUS: (1e-6, 1e-8),
    UNNORMALIZED: (1e-6, 1e-8),
}


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


EACH = [
    pytest.param(operator, *case.values, id=f"{operator.name}-{case.id}")
    for operator in LARGEST_ERRORS
    for case in examples(operator).args[1]
]


@pytest.mark.parametrize(("operator", "arguments", "backend", "dtype"), EACH)
def test_results_and_gradients_are_the_definitions(
    operator: Operator, arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(operator, backend, arguments, dtype)
    assert errors.worst < LARGEST_ERRORS[operator][dtype == torch.float64], errors


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("operator", LARGEST_ERRORS, ids=lambda operator: operator.name)
def test_compiled_without_a_break_it_is_the_same(operator: Operator, backend: str) -> None:
    """Results and gradients of the example that has most of what there may be."""
    torch._dynamo.reset()
    given = max(check.page(operator).examples().values(), key=lambda x: sum(y is not None for y in x))
    results = []
    with use_backend(backend):
        for run in (operator, torch.compile(lambda *x: operator(*x), fullgraph=True, backend="aot_eager")):
            copies = [x.clone().requires_grad_() if is_float(x) else x for x in given]
            found = run(*copies)[: len(operator.results(*given)) - operator.internal]
            loss = sum(torch.where(x.isfinite(), x, 0).square().sum() for x in found if x.requires_grad)
            leaves = [x for x in copies if is_float(x)]
            results.append([*found, *torch.autograd.grad(loss, leaves, allow_unused=True)])
    for expected, actual in zip(*results, strict=True):
        if expected is None:  # of angles, of which torch's own operations have one
            continue
        largest = max([1.0, *expected[expected.isfinite()].abs().tolist()])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_arguments_stay_as_they_are(backend: str, dtype: torch.dtype) -> None:
    """Of all operators, forward and backward: states are gone on from twice. A step writes into its cache, as asked."""
    for operator in check.find_operators("femixer.kernels", "femixer.baselines.kernels"):
        for name, arguments in check.page(operator).examples().items() if operator.name != "softmax_step" else ():
            given = [x.detach().requires_grad_() if is_float(x) else x for x in check.cast(arguments, dtype)]
            kept = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in given]
            with use_backend(backend):
                found = [x for x in operator(*given) if x.requires_grad]
                if found:
                    torch.autograd.grad(sum(x.sum() for x in found), [*filter(is_float, given)], allow_unused=True)
            for x, before in zip(given, kept, strict=True):
                same = not isinstance(x, torch.Tensor) or torch.equal(x.nan_to_num(), before.nan_to_num())
                assert same, (operator.name, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_selective_scan_token_by_token_is_all_at_once(backend: str) -> None:
    *given, marks, state = check.page(SELECTIVE_SCAN).examples()["with marks and state"]
    with use_backend(backend), torch.no_grad():
        whole, last = selective_scan(*given, marks, state)
        rows = []
        for t in range(marks.shape[1]):
            y, state = selective_scan(given[0], *(x[:, t : t + 1] for x in given[1:]), marks[:, t : t + 1], state)
            rows.append(y)
    torch.testing.assert_close((torch.cat(rows, 1), state), (whole, last), rtol=1e-5, atol=1e-5)


def test_logits_of_half_precision_lose_no_more_digits() -> None:
    x, bias = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5)
    with use_backend("plain"):
        assert torch.equal(softplus(x, bias, -1.0), softplus(x.float(), bias, -1.0))
