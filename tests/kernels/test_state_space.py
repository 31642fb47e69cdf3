"""The state-space read on every backend against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

import femixer
from femixer.kernels import check
from femixer.kernels.marks import PADDING, START
from femixer.kernels.state_space import OPERATOR, Modes, System, plain, state_space_read

from .backends import BACKENDS, examples


def mamba(batch: int, length: int, channels: int, modes: int, seed: int = 0) -> System:
    torch.manual_seed(seed)
    step, write, read = torch.rand(batch, length, channels), *torch.rand(2, batch, length, modes)
    return System(-torch.rand(modes, channels), step, write, read)


def ssm(channels: int, modes: int) -> System:
    torch.manual_seed(0)
    return System(-torch.rand(modes, channels), weight=torch.rand(modes, channels), skip=torch.rand(channels))


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors, allowed = check.compare(OPERATOR, backend, arguments, dtype), 1e-6 if dtype == torch.float32 else 1e-11
    assert errors.results < allowed, errors
    if backend == "plain" and arguments[7] is not None:  # whose backward reads the free energy as it was rounded
        allowed = max(allowed, torch.finfo(dtype).eps * float((arguments[7] * arguments[6]).abs().max()))
    assert errors.worst < allowed, errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mamba", "ssm"])
def test_going_on_from_a_state_is_reading_at_once(backend: str, kind: str) -> None:
    system = mamba(2, 45, 5, 3) if kind == "mamba" else ssm(5, 3)
    v, beta = torch.randn(2, 45, 5), 0.3 + torch.rand(5)
    marks = torch.zeros(2, 45, dtype=torch.int8)
    marks[0, [0, 3, 44]], marks[1, [7, 17, 30]] = PADDING, START
    state = Modes.empty(system.rate, v)
    with femixer.use_backend(backend):
        whole = state_space_read(system, v, beta, marks, state)
        parts = []
        for here in torch.arange(45).split([1, 16, 1, 19, 8]):
            now = [x[:, here] if x is not None and x.dim() == 3 else x for x in system]
            parts.append(state_space_read(System(*now), v[:, here], beta, marks[:, here], state))
            state = parts[-1].state
    for name in ("mean", "free", "log_total"):
        together = torch.cat([getattr(part, name) for part in parts], 1)
        torch.testing.assert_close(together, getattr(whole, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.sums, whole.state.sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_token_is_read_as_it_is_and_exclusively_not_at_all(backend: str) -> None:
    system, v, beta = mamba(2, 1, 3, 2), torch.randn(2, 1, 3), torch.ones(3)
    with femixer.use_backend(backend):
        read = state_space_read(system, v, beta, None, Modes.empty(system.rate, v))
        before = state_space_read(system, v, beta, None, Modes.empty(system.rate, v), exclusive=True)
    torch.testing.assert_close(read.mean, v)
    torch.testing.assert_close(read.free, v)
    assert (before.mean == 0).all()
    assert (before.log_total == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(0, 3), (2, 0)])
def test_without_tokens_the_state_stays(backend: str, size: tuple[int, int]) -> None:
    system, v = mamba(*size, 5, 2), torch.empty(*size, 5, requires_grad=True)
    state = Modes(torch.rand(size[0], 3, 2, 5).double(), torch.rand(size[0], 5).double())
    with femixer.use_backend(backend):
        read = state_space_read(system, v, torch.ones(5), None, state)
        (read.mean.sum() + read.free.sum()).backward()
    assert read.mean.shape == read.free.shape == v.grad.shape == v.shape
    assert torch.equal(read.state.sums, state.sums)
    assert torch.equal(read.state.top, state.top)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["v", "step", "write", "read"])
def test_nan_comes_out_and_stays_in_its_channel_or_batch(backend: str, where: str) -> None:
    system, v = mamba(2, 37, 5, 3), torch.randn(2, 37, 5)
    given = {**system._asdict(), "v": v}
    given[where][0, 20, 1] = torch.nan
    with femixer.use_backend(backend):
        read = state_space_read(system, v, torch.ones(5), None, Modes.empty(system.rate, v))
    for x in (read.mean, read.free, *([] if where == "v" else [read.log_total])):
        assert x[0, 20, 1].isnan()
        assert x[1].isfinite().all()
        assert where not in ("v", "step") or x[0, :, 0].isfinite().all()
        assert x[0, :16].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_is_nan_shows(backend: str) -> None:
    system, v = mamba(1, 8, 2, 3), torch.randn(1, 8, 2)
    with femixer.use_backend(backend):
        read = state_space_read(system, v, torch.tensor([torch.nan, 1.0]), None, Modes.empty(system.rate, v))
    assert read.free[..., 0].isnan().all()
    assert read.free[..., 1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_may_hold_anything(backend: str) -> None:
    system, v = mamba(2, 37, 5, 3), torch.randn(2, 37, 5)
    marks = torch.zeros(2, 37, dtype=torch.int8)
    marks[:, [0, 1, 20, 36]] = PADDING
    results = []
    for content in (0.0, torch.nan, torch.inf):
        leaves = [None if x is None else x.clone() for x in (*system[1:4], v)]
        for x in leaves:
            x[:, [0, 1, 20, 36]] = content
            x.requires_grad_()
        with femixer.use_backend(backend):
            here = system._replace(step=leaves[0], write=leaves[1], read=leaves[2])
            read = state_space_read(here, leaves[3], torch.ones(5), marks, Modes.empty(system.rate, v))
            grads = torch.autograd.grad((read.mean + read.free).sum() + read.state.sums.sum(), leaves)
        results.append([read.mean, read.free, *read.state, *grads])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("steps", "values", "free"),
    [
        ([1, 1], [0, 300], 300 - 0.313262),  # weights e^-1 and 1
        ([1, 1], [300, 0], 300 - 1.313262),
        ([1, 60], [300, 0], 240.0),
        ([1, 100], [0, 7], 7.0),
        ([1, 1e-4], [-1e4, 1e4], 1e4 - 0.693097),  # two weights that are almost equal
    ],
)
def test_worked_out_by_hand(backend: str, steps: list[float], values: list[float], free: float) -> None:
    step, v = (torch.tensor(x, dtype=torch.float32)[None, :, None] for x in (steps, values))
    ones = torch.ones(1, len(steps), 1)
    system = System(torch.tensor([[-1.0]]), step, ones / step, ones)
    with femixer.use_backend(backend):
        read = state_space_read(system, v, torch.ones(1), None, Modes.empty(system.rate, v))
    assert abs(read.free[0, -1, 0].item() - free) <= 1e-5 * max(1.0, abs(free))


@pytest.mark.parametrize("backend", BACKENDS)
def test_beyond_sight_the_free_energy_is_between_mean_and_maximum(backend: str) -> None:
    v = 1e4 * torch.randn(2, 67, 5)
    system = mamba(2, 67, 5, 3)
    system = system._replace(step=200 * system.step**4)
    with femixer.use_backend(backend):
        read = state_space_read(system, v, torch.ones(5), None, Modes.empty(system.rate, v))
    assert (read.mean <= read.free + 1e-2).all()
    assert (read.free <= v.cummax(1).values + 1e-2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_giant_changes_nothing_before_it(backend: str) -> None:
    system, v = mamba(1, 37, 3, 4), torch.randn(1, 37, 3)
    giant = v.clone()
    giant[:, 30] *= 1e4
    with femixer.use_backend(backend):
        reads = [state_space_read(system, x, torch.ones(3), None, Modes.empty(system.rate, x)) for x in (v, giant)]
    for name in ("mean", "free", "log_total"):
        before, after = (getattr(read, name)[:, :30] for read in reads)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_blocks_of_channels_do_not_change_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    system, v = mamba(2, 33, 7, 3), torch.randn(2, 33, 7)

    def outcome() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*system[:4], v)]
        with femixer.use_backend("plain"):
            read = state_space_read(System(*leaves[:4]), leaves[4], torch.ones(7), None, Modes.empty(system.rate, v))
            return [read.free.detach(), *torch.autograd.grad(read.free.square().sum(), leaves)]

    whole = outcome()
    monkeypatch.setattr(plain, "NUMBERS", 2 * 2 * 48 * 16)
    for a, b in zip(outcome(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_lower_its_precision() -> None:
    system, v = mamba(1, 5, 3, 2), torch.randn(1, 5, 3)
    with torch.autocast("cpu", torch.bfloat16), femixer.use_backend("plain"):
        low = state_space_read(system, v, torch.ones(3), None, Modes.empty(system.rate, v))
    with femixer.use_backend("plain"):
        full = state_space_read(system, v, torch.ones(3), None, Modes.empty(system.rate, v))
    assert torch.equal(low.free, full.free)


def test_plain_torch_is_traced_whole() -> None:
    system, v = mamba(1, 19, 2, 3), torch.randn(1, 19, 2)
    given = system, v, torch.ones(2), None, Modes.empty(system.rate, v)
    with femixer.use_backend("plain"):
        compiled = torch.compile(state_space_read, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given).free, state_space_read(*given).free)
