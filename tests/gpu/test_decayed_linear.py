"""The Triton kernels of decayed linear attention, interpreted, against the definition; their launches without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.kernels import check, dispatch
from femixer.kernels.decayed_linear import OPERATOR, decayed_linear_read, definition, example, examples
from femixer.kernels.marks import PADDING, START
from femixer.kernels.triton_launch import aimed_at, recorded

GATES = pytest.mark.parametrize("gates", [0, 1, 5], ids=["none", "head", "channel"])
EXAMPLES = examples()


def one_head(arguments: tuple[Any, ...], b: int = 0, g: int = 0) -> tuple[Any, ...]:
    """Of one sequence and key/value head: the interpreter runs one program after the other."""
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    repeats = q.shape[2] // k.shape[2]
    row, head = slice(b, b + 1), slice(g, g + 1)
    return (
        q[row, :, g * repeats : (g + 1) * repeats],
        k[row, :, head],
        None if gate is None else gate[row, :, head],
        v[row, :, head],
        None if beta is None else beta[head],
        None if marks is None else marks[row],
        None if sums is None else sums[row, head],
        None if top is None else top[row, head],
        exclusive,
        keep,
    )


def wide_example(length: int, gates: int, keys: int = 19, values: int = 17, **options: Any) -> tuple[Any, ...]:
    """One head with more channels than a kernel takes at a time."""
    random = torch.Generator().manual_seed(3)
    arguments = list(one_head(example(length, gates=gates, **options)))
    arguments[0], arguments[1] = (0.01 + torch.randn(1, length, 1, keys, generator=random).relu() for _ in range(2))
    arguments[3] = torch.randn(1, length, 1, values, generator=random)
    arguments[4] = 0.3 + torch.rand(1, values, generator=random)
    if gates > 1:
        arguments[2] = -torch.randn(1, length, 1, keys, generator=random).abs()
    return tuple(arguments)


def assert_exact(arguments: tuple[Any, ...]) -> None:
    errors, allowed = check.compare(OPERATOR, "triton", arguments), check.tolerance(OPERATOR, torch.float32)
    assert errors.results < allowed.results, errors
    assert all(error < allowed.gradients for error in errors.gradients.values()), errors


def assert_same(free: Tensor | None, wanted: Tensor) -> None:
    assert free is not None
    assert ((free - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_and_gradients_are_the_definitions(name: str) -> None:
    # Values of any size: as for the other backends, errors are relative to the largest gradient of all heads.
    assert_exact(EXAMPLES[name] if name.startswith("values") else one_head(EXAMPLES[name], b=1, g=2))


WALKS = ("no gate", "marks", "gates of channels", "marks, grouped heads, exclusive, kept", "values of any size")


@pytest.mark.parametrize("name", WALKS)
def test_a_program_walks_through_several_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long sequences, here because few programs are wanted."""
    monkeypatch.setattr("femixer.kernels.decayed_linear.triton_gpu.PROGRAMS", 1)
    assert_exact(EXAMPLES[name] if name.startswith("values") else one_head(EXAMPLES[name], b=1, g=2))


@GATES
def test_on_an_a100_rows_are_taken_some_at_a_time_and_gradients_chunk_by_chunk(gates: int) -> None:
    with aimed_at("sm_80"):
        assert_exact(wide_example(67, gates, keep=True))


def test_several_sequences_and_heads() -> None:
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = EXAMPLES["19 from a state, one gate"]
    q, k, gate, v = (x[:, :, :2] for x in (q, k, gate, v))
    assert_exact((q, k, gate, v, beta[:2], marks, sums[:, :2], top[:, :2], exclusive, keep))


@pytest.mark.parametrize("gates", [1, 5], ids=["head", "channel"])
def test_more_channels_than_a_kernel_takes_at_a_time(gates: int) -> None:
    assert_exact(wide_example(37, gates, keep=True))


@pytest.mark.parametrize("gates", [1, 5], ids=["head", "channel"])
def test_half_precision_is_as_good_as_plain_torchs(gates: int) -> None:
    arguments = wide_example(19, gates, keys=5, values=3, keep=True)
    found, plain = (check.compare(OPERATOR, each, arguments, torch.float16) for each in ("triton", "plain"))
    assert found.results <= 2 * plain.results + 1e-6, (found, plain)
    for name, error in found.gradients.items():
        assert error <= 2 * plain.gradients[name] + 1e-4, (name, found, plain)


@GATES
@pytest.mark.parametrize("pieces", [[1, 64, 64], [129]])
def test_read_in_pieces_it_is_the_definition(gates: int, pieces: list[int]) -> None:
    q, k, gate, v, beta, marks, *_ = one_head(example(129, gates=gates, marked=True, scale=3.0))
    wanted = definition(q, k, gate, v, beta, marks, None, None, False, True)
    state, found = (None, None), []
    with use_backend("triton"), torch.no_grad():
        for part in torch.arange(129).split(pieces):
            cut = [None if x is None else x[:, part] for x in (q, k, gate, v)]
            found.append(decayed_linear_read(*cut, beta, marks[:, part], *state))
            state = found[-1][3:]
    for i, name in enumerate(("mean", "free", "log_total")):
        torch.testing.assert_close(
            torch.cat([x[i] for x in found], 1), wanted[i].float(), rtol=1e-5, atol=1e-5, msg=name
        )
    torch.testing.assert_close(state[0], wanted[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1], wanted[4], rtol=1e-5, atol=1e-5)


class TestAnyRange:
    @GATES
    def test_a_later_token_decides_no_earlier_result(self, gates: int) -> None:
        q, k, gate, v, beta, *_ = one_head(example(71, gates=gates))
        v[:, 66] = 1e4
        with use_backend("triton"), torch.no_grad():
            mean, free, *_ = decayed_linear_read(q, k, gate, v, beta, keep=False)
        wanted = definition(q, k, gate, v, beta, None, None, None, False, False)
        assert_same(free, wanted[1])
        assert_same(mean, wanted[0])

    @pytest.mark.parametrize("exponent", [1e4, -1e4, 640.0])
    @pytest.mark.parametrize("strength", [3.0, 100.0])
    def test_an_outlier_fades_while_the_slowest_row_of_every_step_does_not(
        self, exponent: float, strength: float
    ) -> None:
        random = torch.Generator().manual_seed(1)
        q, k = (torch.rand(1, 41, 1, 4, generator=random) + 1e-6 for _ in range(2))
        v = torch.randn(1, 41, 1, 2, generator=random)
        v[0, 3] = exponent
        gate = -strength * ((torch.arange(41)[:, None] + torch.arange(4)) % 2)[None, :, None].float()
        arguments = q, k, gate, v, torch.ones(1, 2), None, None, None, False, False
        with use_backend("triton"), torch.no_grad():
            assert_same(OPERATOR(*arguments)[1], definition(*arguments)[1])

    def test_weak_gates_keep_their_digits_behind_strong_ones(self) -> None:
        q, k, gate, v, beta, *_ = one_head(example(61))
        gate[:, :30] -= 1000
        gate[:, 30:] /= 100
        assert_exact((q, k, gate, v, beta, None, None, None, False, False))

    def test_weights_that_strong_gates_leave_nothing_of_are_still_weights(self) -> None:
        q, k, gate, v, beta, *_ = one_head(example(23))
        gate -= 120
        arguments = q, k, gate, v, beta, None, None, None, True, False
        with use_backend("triton"), torch.no_grad():
            found, wanted = OPERATOR(*arguments), definition(*arguments)
        for x, y in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5)


def test_nothing_of_another_segment_or_of_padding_is_seen() -> None:
    q, k, gate, v, beta, *_ = one_head(example(83))
    marks = torch.zeros(1, 83, dtype=torch.int8)
    marks[0, [5, 41]] = START
    marks[:, 50:53] = PADDING
    reads = []
    with use_backend("triton"), torch.no_grad():
        for size in (1.0, 1e5):
            changed = v.clone()
            changed[0, 5:41] *= size
            changed[:, 50:53] = torch.nan if size > 1 else 0
            reads.append(decayed_linear_read(q, k, gate, changed, beta, marks))
    for x, y in zip(reads[0][:3], reads[1][:3], strict=True):
        for rows in (slice(0, 5), slice(41, 83)):
            torch.testing.assert_close(x[0, rows], y[0, rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reads[0][3], reads[1][3], rtol=1e-6, atol=1e-6)


def test_what_is_not_a_number_stays_that() -> None:
    q, k, gate, v, beta, *_ = one_head(example(11))
    v[0, 4] = torch.nan
    with use_backend("triton"), torch.no_grad():
        mean, free, *_ = decayed_linear_read(q, k, gate, v, beta)
    assert mean[0, 4:].isnan().all()
    assert free[0, 4:].isnan().all()


def test_tensors_may_be_views() -> None:
    """As slices of one projection are."""
    q, k, gate, v, beta, *_ = one_head(example(19))
    whole = torch.cat([q, k, v, gate], -1)
    views = whole.split([5, 5, 2, 1], -1)
    with use_backend("triton"), torch.no_grad():
        read = decayed_linear_read(views[0], views[1], views[3], views[2], beta)
        wanted = decayed_linear_read(q, k, gate, v, beta)
    assert torch.equal(read[1], wanted[1])


def meta(length: int, gates: int, keys: int = 64, values: int = 32) -> list[Any]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(2, length, *shape, device="meta", requires_grad=True)

    gate = None if gates == 0 else empty(3, 1 if gates == 1 else keys)
    beta = torch.empty(3, values, device="meta", requires_grad=True)
    return [empty(6, keys), empty(3, keys), gate, empty(3, values), beta, None]


@GATES
def test_launches_do_not_depend_on_the_length(gates: int) -> None:
    counts = []
    for length in (1000, 64000):
        given = meta(length, gates)
        with use_backend("triton"), recorded() as forward:
            mean, free, *_ = decayed_linear_read(*given)
        with recorded() as backward:
            (mean + free).sum().backward()
        counts.append((len(forward), len(backward)))
    assert counts == [(4, 5), (4, 5)]


@GATES
def test_one_token_is_one_launch(gates: int) -> None:
    with use_backend("triton"), torch.no_grad(), recorded() as launches:
        *_, sums, top = decayed_linear_read(*meta(7, gates))
        launches.clear()
        decayed_linear_read(*meta(1, gates), sums, top)
    assert len(launches) == 1
    assert sums.dtype == torch.float32


def test_what_the_kernels_do_not_serve_is_said() -> None:
    wide = meta(5, 1, keys=256)
    with use_backend("triton"), pytest.raises(dispatch.BackendError, match="key heads of 256 channels are too wide"):
        decayed_linear_read(*wide)
    double = [None if x is None else x.double() for x in meta(5, 1)]
    with use_backend("triton"), pytest.raises(dispatch.BackendError, match="float32, bfloat16 and float16"):
        decayed_linear_read(*double)


def test_an_older_triton_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("femixer.kernels.decayed_linear.triton_gpu.VERSION", (3, 6))
    with use_backend("triton"), pytest.raises(dispatch.BackendError, match=r"decayed_linear: it needs triton 3\.7 or"):
        decayed_linear_read(*meta(5, 1))
