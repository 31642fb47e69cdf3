"""The reads of state spaces, per channel and over pairs, on every backend against their definitions."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import femixer
from femixer.kernels import check
from femixer.kernels.marks import PADDING, START
from femixer.kernels.pair_state_space import PairSums, PairSystem, pair_state_space_read
from femixer.kernels.reading import Reading
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


def read_of(system: System, v: Tensor, beta: Tensor, marks: Tensor | None = None) -> Reading:
    """From an empty state."""
    *read, sums, top = state_space_read(*system, v, beta, marks, *Modes.empty(system.rate, v.detach()))
    return Reading(*read, Modes(sums, top))


class Case(NamedTuple):
    """A read `of` a system with values, temperatures and the state before the first token; its part for some tokens."""

    of: Any
    system: Any
    v: Tensor
    beta: Tensor
    empty: Any

    def read(self, backend: str, marks: Tensor | None = None, state: Any = None, **options: bool) -> Any:
        with femixer.use_backend(backend):
            state = self.empty if state is None else state
            *read, sums, top = self.of(*self.system, self.v, self.beta, marks, *state, **options)
        return Reading(*read, type(self.empty)(sums, top))

    def some(self, here: Tensor) -> "Case":
        per_token = [x is not None and x.shape[:2] == self.v.shape[:2] for x in self.system]
        system = (x[:, here] if own else x for x, own in zip(self.system, per_token, strict=True))
        return self._replace(system=type(self.system)(*system), v=self.v[:, here])


def case(kind: str, batch: int, length: int) -> Case:
    if kind == "pairs":
        torch.manual_seed(0)
        heads, width, modes = 3, 5, 4
        gate, (write, read) = -torch.rand(batch, length, heads, modes), torch.rand(2, batch, length, modes)
        pairs = PairSystem(gate, write, read, torch.rand(heads, modes, width), torch.rand(heads, width, modes))
        v, beta = torch.randn(batch, length, heads, width), 0.3 + torch.rand(heads)
        return Case(pair_state_space_read, pairs, v, beta, PairSums.empty(gate))
    system = mamba(batch, length, 5, 3) if kind == "mamba" else ssm(5, 3)
    v, beta = torch.randn(batch, length, 5), 0.3 + torch.rand(5)
    return Case(state_space_read, system, v, beta, Modes.empty(system.rate, v))


EACH = pytest.mark.parametrize("kind", ["mamba", "pairs"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mamba", "ssm", "pairs"])
def test_going_on_from_a_state_is_reading_at_once(backend: str, kind: str) -> None:
    given = case(kind, 2, 45)
    marks = torch.zeros(2, 45, dtype=torch.int8)
    marks[0, [0, 3, 44]], marks[1, [7, 17, 30]] = PADDING, START
    whole, state, parts = given.read(backend, marks), given.empty, []
    for here in torch.arange(45).split([1, 16, 1, 19, 8]):
        parts.append(given.some(here).read(backend, marks[:, here], state))
        state = parts[-1].state
    for name in ("mean", "free", "log_total"):
        together = torch.cat([getattr(part, name) for part in parts], 1)
        torch.testing.assert_close(together, getattr(whole, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.sums, whole.state.sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_one_token_is_weighed_by_its_channels_alone_and_exclusively_not_read_at_all(backend: str, kind: str) -> None:
    given = case(kind, 2, 1)
    system, v, beta = given.system, given.v, given.beta
    read, before = given.read(backend), given.read(backend, exclusive=True)
    mean = free = v
    if kind == "pairs":
        shares = torch.einsum("hjn,btn,btn,hnk->bthjk", system.gather, system.read, system.write, system.spread)
        shares = shares / shares.sum(-1, keepdim=True)
        mean = (shares * v[:, :, :, None]).sum(-1)
        free = (shares * (beta[:, None, None] * v[:, :, :, None]).exp()).sum(-1).log() / beta[:, None]
    torch.testing.assert_close(read.mean, mean)
    torch.testing.assert_close(read.free, free)
    assert (before.mean == 0).all()
    assert (before.log_total == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(0, 3), (2, 0)])
@EACH
def test_without_tokens_the_state_stays(backend: str, size: tuple[int, int], kind: str) -> None:
    given = case(kind, *size)
    given.v.requires_grad_()
    state = type(given.empty)(*(torch.rand(x.shape).double() for x in given.empty))
    read = given.read(backend, None, state)
    (read.mean.sum() + read.free.sum()).backward()
    assert read.mean.shape == read.free.shape == given.v.grad.shape == given.v.shape
    assert torch.equal(read.state.sums, state.sums)
    assert torch.equal(read.state.top, state.top)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["v", "step", "write", "read"])
@EACH
def test_nan_comes_out_and_stays_in_its_head_or_batch(backend: str, where: str, kind: str) -> None:
    given = case(kind, 2, 37)
    at = "gate" if where == "step" and kind == "pairs" else where
    (given.v if where == "v" else getattr(given.system, at))[0, 20, 1] = torch.nan
    read = given.read(backend)
    for x in (read.mean, read.free, *([] if where == "v" else [read.log_total])):
        assert x[0, 20, 1].isnan().all()
        assert x[1].isfinite().all()
        assert where not in ("v", "step") or x[0, :, 0].isfinite().all()
        assert x[0, :16].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_is_nan_shows(backend: str) -> None:
    system, v = mamba(1, 8, 2, 3), torch.randn(1, 8, 2)
    with femixer.use_backend(backend):
        read = read_of(system, v, torch.tensor([torch.nan, 1.0]))
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
            read = read_of(here, leaves[3], torch.ones(5), marks)
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
        read = read_of(system, v, torch.ones(1))
    assert abs(read.free[0, -1, 0].item() - free) <= 1e-5 * max(1.0, abs(free))


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_beyond_sight_the_free_energy_is_between_mean_and_maximum(backend: str, kind: str) -> None:
    given = case(kind, 2, 67)
    name = "gate" if kind == "pairs" else "step"
    system = given.system._replace(**{name: 200 * getattr(given.system, name) ** 3})
    given = given._replace(system=system, v=1e4 * given.v)
    read = given.read(backend)
    seen = given.v.amax(-1, keepdim=True) if kind == "pairs" else given.v
    assert (read.mean <= read.free + 1e-2).all()
    assert (read.free <= seen.cummax(1).values + 1e-2).all()


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_a_later_giant_changes_nothing_before_it(backend: str, kind: str) -> None:
    given = case(kind, 1, 37)
    giant = given.v.clone()
    giant[:, 30] *= 1e4
    reads = [given._replace(v=x).read(backend) for x in (given.v, giant)]
    for name in ("mean", "free", "log_total"):
        before, after = (getattr(read, name)[:, :30] for read in reads)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_blocks_of_channels_do_not_change_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    system, v = mamba(2, 33, 7, 3), torch.randn(2, 33, 7)

    def outcome() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*system[:4], v)]
        with femixer.use_backend("plain"):
            read = read_of(System(*leaves[:4]), leaves[4], torch.ones(7))
            return [read.free.detach(), *torch.autograd.grad(read.free.square().sum(), leaves)]

    whole = outcome()
    monkeypatch.setattr(plain, "NUMBERS", 2 * 2 * 48 * 16)
    for a, b in zip(outcome(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_lower_its_precision() -> None:
    system, v = mamba(1, 5, 3, 2), torch.randn(1, 5, 3)
    with torch.autocast("cpu", torch.bfloat16), femixer.use_backend("plain"):
        low = read_of(system, v, torch.ones(3))
    with femixer.use_backend("plain"):
        full = read_of(system, v, torch.ones(3))
    assert torch.equal(low.free, full.free)


def test_plain_torch_is_traced_whole() -> None:
    system, v = mamba(1, 19, 2, 3), torch.randn(1, 19, 2)
    given = *system, v, torch.ones(2), None, *Modes.empty(system.rate, v)
    with femixer.use_backend("plain"):
        compiled = torch.compile(state_space_read, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given)[1], state_space_read(*given)[1])
