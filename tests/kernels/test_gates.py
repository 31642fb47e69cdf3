"""The gates of a read on every backend against their definition."""

import pytest
import torch

from femixer import use_backend
from femixer.gates import gated_read
from femixer.kernels import check
from femixer.kernels.gates import OPERATOR

from .backends import BACKENDS

READS = {name: x[:4] for name, x in check.page(OPERATOR).examples().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_where_they_are(backend: str) -> None:
    """Columns of a projection, heads that were transposed, a single row."""
    given = READS["width 33"]
    with use_backend(backend), torch.no_grad():
        whole = gated_read(*given)
        copied = gated_read(*(x.contiguous() for x in given))
        some = gated_read(*(x[1:, 2:3] for x in given))
    torch.testing.assert_close(whole, copied, rtol=0, atol=1e-6)
    torch.testing.assert_close(some, whole[1:, 2:3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_a_number_propagates(which: int, backend: str) -> None:
    given = list(READS["width 33"])
    given[which] = given[which].clone()
    given[which][1, 2, 0, 3] = torch.nan
    with use_backend(backend), torch.no_grad():
        read = gated_read(*given)
    assert read[1, 2, 0, 3].isnan()
    assert torch.isfinite(read[0]).all()


def test_a_read_without_gates_is_the_mean_or_the_free_energy_itself() -> None:
    mean, free, _, gate = READS["width 5"]
    assert gated_read(mean, None, None, None) is mean
    assert gated_read(mean, free, None, None) is free
    assert torch.equal(gated_read(mean, free, None, gate), gated_read(free, None, None, gate))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_lower_the_precision(backend: str) -> None:
    given = READS["width 5"]
    with use_backend(backend):
        with torch.autocast("cpu", torch.bfloat16):
            low = gated_read(*given)
        assert torch.equal(low, gated_read(*given))


def test_only_the_arguments_are_kept_for_gradients() -> None:
    leaves = [x.clone().requires_grad_() for x in READS["width 5"]]
    given = {x.data_ptr() for x in leaves}
    for backend in BACKENDS:
        kept: list[int] = []
        with (
            use_backend(backend),
            torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.data_ptr()) or x, lambda x: x),
        ):
            gated_read(*leaves)
        assert {*kept} == given


def test_tensors_of_other_shapes_are_refused_where_memory_is_read_by_places() -> None:
    mean, free, lam, gate = (x.contiguous() for x in READS["width 5"])
    for given in ((mean, free, lam[:, :1], gate), (mean[0], free[0], lam[0], gate[0])):
        with use_backend("numba"), pytest.raises(ValueError, match=r"gates take tensors \[B, T, H, D\] of one shape"):
            gated_read(*given)
