"""State spaces, per channel and over pairs, in Triton's interpreter against their definitions.

The interpreter takes its time, so the operators' examples are cut to few tokens, and chunks are as small.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.kernels import check, dispatch
from femixer.kernels.marks import PADDING, START
from femixer.kernels.operator import Operator
from femixer.kernels.pair_state_space import OPERATOR as PAIRS
from femixer.kernels.pair_state_space import triton_gpu as pairs_triton
from femixer.kernels.state_space import OPERATOR as SPACES
from femixer.kernels.state_space import triton_gpu as spaces_triton
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined

LENGTH = 9


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spaces_triton, pairs_triton):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(spaces_triton, "STRETCH", 2)


def few_tokens(operator: Operator, name: str) -> tuple[Any, ...]:
    """An example of at most LENGTH tokens, with padding and starts at both ends of chunks and inside of them."""
    arguments = check.page(operator).examples()[name]
    given = dict(zip(operator.arguments, arguments, strict=True))
    for key in ("step", "gate", "write", "read", "v"):
        if given.get(key) is not None:
            given[key] = given[key][:, :LENGTH]
    if operator is PAIRS and name != "marks":  # which has three heads
        given |= {key: given[key][:, :, :1] for key in ("gate", "v", "sums")}
        given |= {key: given[key][:1] for key in ("spread", "gather")}
        given |= {"beta": None if given["beta"] is None else given["beta"][:1], "top": given["top"][:, :1]}
    if given["marks"] is not None:
        marks = torch.zeros(2, given["v"].shape[1], dtype=torch.int8)
        marks[0, [0, 3, 5, -1]], marks[1, [2, 4]] = PADDING, START
        given["marks"] = marks
    return tuple(given.values())


def cases(operator: Operator) -> list[Any]:
    return [pytest.param(operator, name, id=f"{operator.name}-{name}") for name in check.page(operator).examples()]


@pytest.mark.parametrize(("operator", "name"), [*cases(SPACES), *cases(PAIRS)])
def test_results_and_gradients_are_the_definitions(operator: Operator, name: str) -> None:
    assert_as_defined(operator, few_tokens(operator, name), torch.float32)


@pytest.mark.parametrize("operator", [SPACES, PAIRS])
def test_half_precision_is_computed_in_float32(operator: Operator) -> None:
    """A mean that is kept in half precision is the float32 one, rounded."""
    name = "mamba" if operator is SPACES else "causal"
    arguments = check.cast(few_tokens(operator, name), torch.float16)
    wanted = check.page(operator).definition(*arguments)
    with use_backend("triton"), torch.no_grad():
        mean, *others = operator(*arguments)
    assert mean.dtype == (torch.float16 if operator is SPACES else torch.float32)
    rounding = torch.finfo(mean.dtype).eps / 2
    torch.testing.assert_close(mean.double(), wanted[0].double(), rtol=1e-5 + rounding, atol=1e-5)
    for a, b in zip(others[:2], wanted[1:3], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("repeatable", [True, False])
def test_amounts_are_summed_over_blocks_of_channels(repeatable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they come, in memory, or from parts, whose sum repeats to the last bit."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    monkeypatch.setattr(spaces_triton, "NUMBERS", 16)
    given = dict(zip(SPACES.arguments, few_tokens(SPACES, "mamba"), strict=True))
    given |= {key: given[key].repeat_interleave(2, -1) for key in ("rate", "step", "v", "beta", "sums", "top")}
    with recorded() as launches:
        assert_as_defined(SPACES, tuple(given.values()), torch.float32)
    assert launches[-1].name == "gradients" and launches[-1].grid[1] == 2
    assert launches[-1].options["ADDED"] is not repeatable


def test_a_token_counts_after_an_outlier_has_faded() -> None:
    """The top follows the slowest mode: what an outlier leaves after four tokens does not hide what comes then."""
    torch.manual_seed(0)
    rate = torch.tensor([[-0.5], [-40.0]])
    step, write = torch.full((1, LENGTH, 1), 30.0), torch.rand(1, LENGTH, 2)
    read = torch.rand(1, LENGTH, 2)
    v = torch.randn(1, LENGTH, 1)
    v[0, 1] = 60.0
    state = torch.zeros(1, 3, 2, 1, dtype=torch.float64), torch.full((1, 1), -torch.inf, dtype=torch.float64)
    system = rate, step, write, read, None, None
    arguments = (*system, v, torch.ones(1), None, *state, False)
    assert check.compare(SPACES, "triton", arguments).results <= 1e-5


@pytest.mark.parametrize(("operator", "name"), [(SPACES, "mamba, marks"), (PAIRS, "marks")])
def test_token_by_token_is_the_whole(operator: Operator, name: str) -> None:
    arguments = few_tokens(operator, name)
    at = {key: operator.arguments.index(key) for key in operator.arguments}
    with use_backend("triton"), torch.no_grad():
        whole = operator(*arguments)
        state, rows = (arguments[at["sums"]], arguments[at["top"]]), []
        for t in range(LENGTH):
            now = list(arguments)
            for key in ("step", "gate", "write", "read", "v", "marks"):
                if key in at and isinstance(now[at[key]], Tensor):
                    now[at[key]] = now[at[key]][:, t : t + 1]
            now[at["sums"]], now[at["top"]] = state
            with recorded() as launches:
                *row, sums, top = operator(*now)
            assert len(launches) == 1
            state = sums, top
            rows.append(row)
    for i in range(3):
        torch.testing.assert_close(torch.cat([row[i] for row in rows], 1), whole[i], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[0], whole[3], rtol=1e-5, atol=1e-5)


def without_data(operator: Operator, length: int) -> list[Any]:
    """The arguments of Mamba's read and of its read over pairs, with gradients."""
    batch, heads, width, modes = 2, 8, 64, 16

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    amounts = empty(batch, length, modes), empty(batch, length, modes)
    if operator is SPACES:
        channels = heads * width
        system = [empty(modes, channels), empty(batch, length, channels), *amounts, None, None]
        state = torch.empty(batch, 3, modes, channels, device="meta"), torch.empty(batch, channels, device="meta")
        return [*system, empty(batch, length, channels), empty(channels), None, *state, False]
    system = [empty(batch, length, heads, modes), *amounts, empty(heads, modes, width), empty(heads, width, modes)]
    state = torch.empty(batch, 3, heads, modes, device="meta"), torch.empty(batch, heads, device="meta")
    return [*system, empty(batch, length, heads, width), empty(heads), None, *state, False]


@pytest.mark.parametrize("operator", [SPACES, PAIRS])
@pytest.mark.parametrize("length", [257, 65_537])
def test_launches_do_not_depend_on_the_length(operator: Operator, length: int) -> None:
    arguments = without_data(operator, length)
    with use_backend("triton"), recorded() as forward:
        mean, free, *_ = operator(*arguments)
    with recorded() as backward:
        (mean.sum() + free.sum()).backward()
    assert [launch.name for launch in forward] == ["summarize", "carry", "read_chunks"]
    assert [launch.name for launch in backward] == ["summarize", "carry", "adjoints", "carry_back", "gradients"]


@pytest.mark.parametrize("operator", [SPACES, PAIRS])
def test_what_it_does_not_serve_is_named(operator: Operator) -> None:
    arguments = check.cast(few_tokens(operator, next(iter(check.page(operator).examples()))), torch.float64)
    assert "not torch.float64" in str(dispatch.refusal(operator, "triton", arguments))


def test_gradients_of_free_energies_far_below_the_top_are_finite() -> None:
    """Large weights of small values, after a large value that nobody reads: exp(90) alone is not a number."""
    v = torch.tensor([90.0, 0.0, 0.5]).view(1, 3, 1)
    amount = torch.tensor([0.0, 150.0, 150.0]).view(1, 3, 1)
    nothing = torch.zeros(1, 3, 1, 1, dtype=torch.float64), torch.full((1, 1), -torch.inf, dtype=torch.float64)
    rate, step = torch.full((1, 1), -1e-4), torch.ones(1, 3, 1)
    inputs = [x.requires_grad_() for x in (rate, step, amount, v)]
    with use_backend("triton"):
        mean, free, *_ = SPACES(rate, step, amount, amount, None, None, v, torch.ones(1), None, *nothing, False)
    assert torch.allclose(free[0, 1:, 0], torch.tensor([0.0, 0.2809]), atol=1e-3)
    assert all(x.isfinite().all() for x in torch.autograd.grad(free.sum() + mean.sum(), inputs))
