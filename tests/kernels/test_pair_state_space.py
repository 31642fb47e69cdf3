"""The read over pairs of token and channel on every backend against its definition."""

from typing import Any

import pytest
import torch

import femixer
from femixer.kernels import check
from femixer.kernels.marks import PADDING, START
from femixer.kernels.pair_state_space import OPERATOR, PairSums, PairSystem, pair_state_space_read

from .backends import BACKENDS, examples


def drawn(batch: int, length: int) -> tuple[PairSystem, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    heads, width, modes = 3, 5, 4
    gate, (write, read) = -torch.rand(batch, length, heads, modes), torch.rand(2, batch, length, modes)
    system = PairSystem(gate, write, read, torch.rand(heads, modes, width), torch.rand(heads, width, modes))
    return system, torch.randn(batch, length, heads, width), 0.3 + torch.rand(heads)


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < (1e-6 if dtype == torch.float32 else 1e-12), errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_going_on_from_a_state_is_reading_at_once(backend: str) -> None:
    system, v, beta = drawn(2, 45)
    marks = torch.zeros(2, 45, dtype=torch.int8)
    marks[0, [0, 3, 44]], marks[1, [7, 17, 30]] = PADDING, START
    state = PairSums.empty(system.gate)
    with femixer.use_backend(backend):
        whole = pair_state_space_read(system, v, beta, marks, state)
        parts = []
        for here in torch.arange(45).split([1, 16, 1, 19, 8]):
            now = PairSystem(*(x[:, here] for x in system[:3]), *system[3:])
            parts.append(pair_state_space_read(now, v[:, here], beta, marks[:, here], state))
            state = parts[-1].state
    for name in ("mean", "free", "log_total"):
        together = torch.cat([getattr(part, name) for part in parts], 1)
        torch.testing.assert_close(together, getattr(whole, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.sums, whole.state.sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_alone_is_weighed_by_its_channels_only(backend: str) -> None:
    system, v, beta = drawn(2, 1)
    shares = torch.einsum("hjn,btn,btn,hnk->bthjk", system.gather, system.read, system.write, system.spread)
    shares = shares / shares.sum(-1, keepdim=True)
    with femixer.use_backend(backend):
        read = pair_state_space_read(system, v, beta, None, PairSums.empty(system.gate))
        before = pair_state_space_read(system, v, beta, None, PairSums.empty(system.gate), exclusive=True)
    torch.testing.assert_close(read.mean, (shares * v[:, :, :, None]).sum(-1))
    energy = (shares * (beta[:, None, None] * v[:, :, :, None]).exp()).sum(-1)
    torch.testing.assert_close(read.free, energy.log() / beta[:, None])
    assert (before.mean == 0).all()
    assert (before.log_total == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(0, 3), (2, 0)])
def test_without_tokens_the_state_stays(backend: str, size: tuple[int, int]) -> None:
    system, v, beta = drawn(*size)
    state = PairSums(torch.rand(size[0], 3, 3, 4).double(), torch.rand(size[0], 3).double())
    with femixer.use_backend(backend):
        read = pair_state_space_read(system, v.requires_grad_(), beta, None, state)
    assert read.mean.shape == read.free.shape == v.shape
    assert torch.equal(read.state.sums, state.sums)
    assert torch.equal(read.state.top, state.top)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["v", "gate", "write", "read"])
def test_nan_comes_out(backend: str, where: str) -> None:
    system, v, beta = drawn(2, 37)
    given = {**system._asdict(), "v": v}
    given[where][0, 20, 1] = torch.nan
    with femixer.use_backend(backend):
        read = pair_state_space_read(system, v, beta, None, PairSums.empty(system.gate))
    for x in (read.mean, read.free):
        assert x[0, 20, 1].isnan().all()
        assert x[1].isfinite().all()
        assert x[0, :16].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_beyond_sight_the_free_energy_is_between_mean_and_maximum(backend: str) -> None:
    system, v, beta = drawn(2, 67)
    system, v = system._replace(gate=200 * system.gate**3), 1e4 * v
    with femixer.use_backend(backend):
        read = pair_state_space_read(system, v, beta, None, PairSums.empty(system.gate))
    assert (read.mean <= read.free + 1e-2).all()
    assert (read.free <= v.amax(-1, keepdim=True).cummax(1).values + 1e-2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_giant_changes_nothing_before_it(backend: str) -> None:
    system, v, beta = drawn(1, 37)
    giant = v.clone()
    giant[:, 30] *= 1e4
    with femixer.use_backend(backend):
        reads = [pair_state_space_read(system, x, beta, None, PairSums.empty(system.gate)) for x in (v, giant)]
    for name in ("mean", "free", "log_total"):
        before, after = (getattr(read, name)[:, :30] for read in reads)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
