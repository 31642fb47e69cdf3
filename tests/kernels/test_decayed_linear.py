"""Decayed linear attention on every backend against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.decayed_linear import OPERATOR, FastWeights, decayed_linear_read, definition, example
from femixer.kernels.marks import PADDING, START
from femixer.kernels.reading import Reading

from .backends import BACKENDS, examples

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
GATES = pytest.mark.parametrize("gates", [0, 1, 5], ids=["none", "head", "channel"])
EXACT = 1e-9  # float64; the compiled logarithm is good to about 1e-10


def read_of(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor,
    marks: Tensor | None = None,
    state: FastWeights | None = None,
    keep: bool = True,
) -> Reading:
    *read, sums, top = decayed_linear_read(q, k, gate, v, beta, marks, *(state or (None, None)), keep=keep)
    return Reading(*read, FastWeights(sums, top))


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    allowed = check.tolerance(OPERATOR, dtype)
    assert errors.results < allowed.results, errors
    assert errors.worst < allowed.gradients, errors


@EVERY_BACKEND
@GATES
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 17, 63, 64, 65, 131])
def test_any_length(backend: str, gates: int, exclusive: bool, length: int) -> None:
    arguments = example(length, gates=gates, marked=length % 2 == 1, exclusive=exclusive, keep=length % 4 == 1)
    errors = check.compare(OPERATOR, backend, arguments, torch.float64)
    assert errors.worst < EXACT, errors


@EVERY_BACKEND
@GATES
@pytest.mark.parametrize("pieces", [[1, 1, 1, 70], [64, 9], [31, 42], [73]])
def test_read_in_pieces_it_is_the_whole(backend: str, gates: int, pieces: list[int]) -> None:
    q, k, gate, v, beta, marks, *_ = example(73, gates=gates, marked=True, scale=30.0)
    with use_backend(backend):
        whole = read_of(q, k, gate, v, beta, marks)
        state, found = None, []
        for part in torch.arange(73).split(pieces):
            cut = [None if x is None else x[:, part] for x in (q, k, gate, v)]
            read = read_of(*cut, beta, marks[:, part], state)
            state = read.state
            found.append(read)
    for name in ("mean", "free", "log_total"):
        parts, wanted = torch.cat([getattr(x, name) for x in found], 1), getattr(whole, name)
        torch.testing.assert_close(parts, wanted, rtol=1e-6, atol=1e-5, msg=name)
    torch.testing.assert_close(state, whole.state, rtol=1e-6, atol=1e-5)


@EVERY_BACKEND
@GATES
def test_a_later_token_decides_no_earlier_result(backend: str, gates: int) -> None:
    q, k, gate, v, beta, *_ = example(67, gates=gates)
    with use_backend(backend):
        before = read_of(q, k, gate, v, beta, keep=False)
        for at in (3, 9, 66):
            later = v.clone()
            later[:, at] = 1e4
            after = read_of(q, k, gate, later, beta, keep=False)
            for x, y in zip(before[:2], after[:2], strict=True):
                assert ((x - y).abs() <= 1e-5 * x.abs().clamp(min=1))[:, :at].all(), at
            wanted = definition(q, k, gate, later, beta, None, None, None, False, False)[1]
            assert ((after.free - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all(), at


@EVERY_BACKEND
@GATES
def test_nothing_of_another_segment_or_of_padding_is_seen(backend: str, gates: int) -> None:
    q, k, gate, v, beta, *_ = example(83, gates=gates)
    marks = torch.zeros(2, 83, dtype=torch.int8)
    marks[0, [5, 41]] = START
    marks[:, 50:53] = PADDING
    with use_backend(backend):
        reads = []
        for size in (1.0, 1e5):
            changed = v.clone()
            changed[0, 5:41] *= size
            changed[:, 50:53] = size
            reads.append(read_of(q, k, gate, changed, beta, marks))
    for x, y in zip(reads[0][:3], reads[1][:3], strict=True):
        for rows in (slice(0, 5), slice(41, 83)):
            torch.testing.assert_close(x[0, rows], y[0, rows], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x[1], y[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reads[0].state.sums, reads[1].state.sums, rtol=1e-6, atol=1e-6)


class TestGatesThatAlternate:
    """All rows of the state fade while the slowest row of every step does not."""

    LENGTH, KEYS = 41, 4

    def arguments(self, period: int, strength: float, exponent: float, beta: float, seed: int) -> tuple[Any, ...]:
        random = torch.Generator().manual_seed(seed)
        q, k = (torch.rand(1, self.LENGTH, 1, self.KEYS, generator=random) + 1e-6 for _ in range(2))
        v = torch.randn(1, self.LENGTH, 1, 2, generator=random)
        v[0, seed % 13] = exponent / beta
        turn = (torch.arange(self.LENGTH)[:, None] // period + torch.arange(self.KEYS)) % 2
        gate = -strength * turn[None, :, None].float()
        return q, k, gate, v, torch.full((1, 2), beta), None, None, None, False, False

    @EVERY_BACKEND
    @given(
        period=st.integers(1, 4),
        strength=st.floats(0.1, 100),
        exponent=st.floats(-1e4, 1e4),
        beta=st.floats(0.1, 10),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=40, deadline=None)
    def test_an_outlier_that_has_faded_leaves_the_free_energy_exact(
        self, backend: str, period: int, strength: float, exponent: float, beta: float, seed: int
    ) -> None:
        arguments = self.arguments(period, strength, exponent, beta, seed)
        wanted = definition(*arguments)[1]
        with use_backend(backend):
            free = OPERATOR(*arguments)[1]
        assert ((free - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all()

    @EVERY_BACKEND
    @pytest.mark.parametrize("strength", [3.0, 80.0])
    def test_gradients(self, backend: str, strength: float) -> None:
        errors = check.compare(OPERATOR, backend, self.arguments(1, strength, 640.0, 1.0, 3), torch.float64)
        assert errors.worst < 1e-8, errors

    @EVERY_BACKEND
    def test_rows_that_fade_at_very_different_rates(self, backend: str) -> None:
        arguments = example(37, gates=5, scale=10.0)
        rates = torch.tensor([0.0, 1.0, 5.0, 10.0, 0.01])
        errors = check.compare(OPERATOR, backend, (*arguments[:2], arguments[2] * rates, *arguments[3:]), torch.float64)
        assert errors.worst < EXACT, errors


class TestHeadsThatAreReadAgain:
    """The compiled loops by matrix products give up heads whose sums show too little."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_grouped_heads_each_counts_once(self, dtype: torch.dtype) -> None:
        """The first head sees nothing but the low value at last, far below the top: it is doubtful, the second not."""
        q, k, v = (torch.zeros(1, 2, heads, width, dtype=dtype) for heads, width in ((2, 2), (1, 2), (1, 1)))
        q[:, :, 0, 0] = q[:, :, 1, 1] = k[0, 0, 0, 1] = k[0, 1, 0, 0] = 1
        k[0, 1, 0, 1], v[0, 0] = 0.5, 100
        beta = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        free = read_of(q, k, None, v, beta, keep=False).free
        assert free is not None
        free.sum().backward()
        # Only the second head's last token weighs two values, 2/3 on 100 and 1/3 on 0: dF/dbeta = -log(2/3) / beta^2.
        torch.testing.assert_close(free[0, 1, 1, 0].item(), 100 + math.log(2 / 3), rtol=1e-6, atol=0)
        assert beta.grad is not None
        torch.testing.assert_close(beta.grad.item(), -math.log(2 / 3), rtol=1e-4, atol=0)

    @pytest.mark.parametrize("gates", [0, 1])
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_a_wild_head_among_tame_ones(self, gates: int, exclusive: bool) -> None:
        arguments = example(65, gates=gates, marked=True, repeats=2, exclusive=exclusive)
        arguments[3][1, :, 2] *= 100
        with use_backend("numba"):
            again = OPERATOR(*arguments)[5]
        assert again.nonzero().tolist() == [[1, 4], [1, 5]]
        errors = check.compare(OPERATOR, "numba", arguments, torch.float32)
        assert errors.worst < 1e-5, errors


@EVERY_BACKEND
@GATES
def test_what_is_not_a_number_stays_that(backend: str, gates: int) -> None:
    q, k, gate, v, beta, *_ = example(11, gates=gates)
    v[0, 4] = torch.nan
    with use_backend(backend):
        read = read_of(q, k, gate, v, beta)
    assert read.free is not None
    assert read.mean[0, 4:].isnan().all()
    assert read.free[0, 4:].isnan().all()
    assert read.free[1].isfinite().all()


@EVERY_BACKEND
@GATES
def test_of_no_tokens_the_state_is_the_one_before(backend: str, gates: int) -> None:
    q, k, gate, v, beta, *_ = example(5, gates=gates)
    with use_backend(backend):
        state = read_of(q, k, gate, v, beta).state
        nothing = [None if x is None else x[:, :0] for x in (q, k, gate, v)]
        read = read_of(*nothing, beta, state=state)
    assert read.mean.shape == (2, 0, 3, 2)
    torch.testing.assert_close(read.state, state, rtol=1e-12, atol=1e-12)


@GATES
def test_transforms_of_functions_go_through(gates: int) -> None:
    """They differentiate the plain forward pass instead of calling its backward."""
    q, k, gate, v, beta, marks, *_ = example(67, gates=gates, marked=True)

    def energy(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, marks: Tensor) -> Tensor:
        gate = None if gate is None else gate[None]
        read = read_of(q[None], k[None], gate, v[None], beta, marks[None])
        assert read.free is not None
        return read.free.square().sum() + read.mean.sum()

    given = (q, k, v) if gate is None else (q, k, v, gate)
    argnums = tuple(range(len(given)))
    rest = (None, 0) if gate is None else (0, 0)
    found = torch.func.vmap(torch.func.grad(energy, argnums), (0, 0, 0, *rest))(q, k, v, gate, marks)
    for b in range(2):
        leaves = [x[b].clone().requires_grad_() for x in given]
        energy(*leaves, *([None] if gate is None else []), marks[b]).backward()
        for x, leaf in zip(found, leaves, strict=True):
            torch.testing.assert_close(x[b], leaf.grad, rtol=1e-4, atol=1e-5)
