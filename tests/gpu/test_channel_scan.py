"""The scan per channel in Triton's interpreter against its definition."""

import math
from typing import Any

import pytest
import torch

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.channel_scan import OPERATOR, channel_scan, definition, triton_gpu
from femixer.kernels.marks import PADDING, START
from femixer.kernels.triton_launch import recorded

from .examples import assert_as_defined, examples


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert_as_defined(OPERATOR, arguments, dtype)


@pytest.mark.parametrize(("length", "channels"), [(2, 67), (8, 1), (9, 3), (67, 2), (129, 1), (307, 1)])
def test_any_length_and_width(length: int, channels: int) -> None:
    """A single chunk, one token more, more channels than a program takes; segments and padding longer than chunks."""
    torch.manual_seed(0)
    key, gate, v = torch.randn(3, 2, length, channels)
    marks = torch.zeros(2, length, dtype=torch.int8)
    marks[0, length // 5 : length // 2] = PADDING
    marks[1, length // 3], marks[1, -1] = START, PADDING
    log_total, mean, above = torch.randn(3, 2, channels, dtype=torch.float64)
    state = torch.stack([log_total, mean, mean + above.abs()])
    assert_as_defined(OPERATOR, (key, -gate.abs(), v, 0.3 + torch.rand(channels), marks, state), torch.float32)


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_values_of_any_size(scale: float) -> None:
    torch.manual_seed(0)
    key, gate, v = torch.randn(3, 1, 67, 5)
    given = 10 * key, -gate.abs(), scale * v, torch.tensor([0.02, 0.1, 0.5, 1, 1]), None, None
    with use_backend("triton"):
        read = channel_scan(*given)
    assert read.free is not None
    wanted = definition(*given)
    assert ((read.free - wanted[1]).abs() <= 1e-5 * wanted[1].abs().clamp(min=1)).all()
    assert (read.mean <= read.free).all()


@pytest.mark.parametrize(
    ("key", "gate", "v", "beta", "free"),
    [
        ([80, -80], [0, 0], [0, 300], 1.0, 140),  # a new token of weight exp(-160)
        ([-80, 80], [0, 0], [300, 0], 1.0, 140),  # an old one
        ([0, 0], [0, -100], [300, 0], 1.0, 200),
        ([0, 0], [0, -50], [571.3, 0], 0.0495, 0),  # the past is 28 nats above and yet counts as exp(-21)
        ([0, 0], [0, 0], [-1e4, 1e4], 0.5, 1e4 - math.log(2) / 0.5),
        ([0, 0, 0], [0, -1e4, -1e4], [1e5, 0, 7], 1.0, 8e4),
    ],
)
def test_worked_out_by_hand(key: list[float], gate: list[float], v: list[float], beta: float, free: float) -> None:
    given = [torch.tensor(x, dtype=torch.float32)[None, :, None] for x in (key, gate, v)]
    with use_backend("triton"):
        read = channel_scan(*given, torch.tensor([beta]))
    assert read.free is not None
    assert abs(read.free[0, -1, 0].item() - free) <= 1e-5 * max(1.0, abs(free))


def test_a_long_slow_rise_does_not_add_up_rounding() -> None:
    length, beta = 16384, torch.tensor([0.02, 0.05, 1.0])
    v = torch.linspace(-5, 5, length)[None, :, None].expand(1, length, 3)
    with use_backend("triton"), torch.no_grad():
        read = channel_scan(None, None, v, beta)
    assert read.free is not None
    count = torch.arange(1, length + 1).double()[:, None]
    wanted = ((beta.double() * v.double()).logcumsumexp(1) - count.log()) / beta.double()
    assert ((read.free - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all()


def test_a_later_token_changes_no_earlier_result() -> None:
    torch.manual_seed(0)
    key, gate, v = torch.randn(3, 1, 43, 3)
    results = []
    for factor in (1, 1e4):
        v[:, 21] *= factor
        key[:, 21] += factor - 1
        with use_backend("triton"):
            results.append(channel_scan(key, -gate.abs(), v, torch.ones(3)))
    for before, after in zip(*(read[:3] for read in results), strict=True):
        assert torch.equal(before[:, :21], after[:, :21])
        assert not torch.equal(before[:, 21:], after[:, 21:])


def test_token_by_token_is_all_at_once() -> None:
    key, gate, v, beta, marks, state = (
        x if x is None or x.dim() == 1 or x.dtype == torch.float64 else x[:, :13]
        for x in check.page(OPERATOR).examples()["with marks and state"]
    )
    with use_backend("triton"), torch.no_grad():
        whole = channel_scan(key, gate, v, beta, marks, state)
        rows = []
        for t in range(v.shape[1]):
            read = channel_scan(*(x[:, t : t + 1] for x in (key, gate, v)), beta, marks[:, t : t + 1], state)
            state = read.state
            rows.append(read)
    for i in range(3):
        torch.testing.assert_close(torch.cat([row[i] for row in rows], 1), whole[i], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole.state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1024, 65536])
def test_three_launches_each_way(length: int) -> None:
    """And one sum over chunks, of the gradient of beta. What is kept does not outweigh one result."""
    given = [torch.empty(2, length, 48, device="meta", requires_grad=True) for _ in range(3)]
    beta = torch.empty(48, device="meta", requires_grad=True)
    with use_backend("triton"), recorded() as launches:
        *read, kept = OPERATOR(*given, beta, None, None)
        names = [each.name for each in launches]
        torch.autograd.backward(read[:2], [torch.empty_like(x) for x in read[:2]])
    assert names == ["summarise", "carry", "read"]
    assert [each.name for each in launches][3:] == ["summarise_back", "carry_back", "gradients"]
    assert kept.nbytes <= read[0].nbytes


def test_one_launch_for_a_token_read_where_it_stands() -> None:
    columns, state = torch.empty(3, 1, 96, device="meta"), torch.empty(3, 3, 48, device="meta")
    with use_backend("triton"), recorded() as launches, torch.no_grad():
        channel_scan(columns[..., :48], None, columns[..., 48:], torch.empty(48, device="meta"), None, state)
    assert [each.name for each in launches] == ["read"]
    assert launches[0].operands[0].shape == (3, 1, 48) and not launches[0].operands[0].is_contiguous()


def test_off_a_cpu_the_state_is_float32() -> None:
    v = torch.empty(2, 5, 3, device="meta")
    for backend in ("plain", "triton"):
        with use_backend(backend):
            assert channel_scan(None, None, v, None).state.dtype == torch.float32


def test_what_it_does_not_serve_is_named() -> None:
    x = torch.empty(2, 3, 5)
    assert triton_gpu.refuse(x, None, x.double(), None, None, None) == (
        "it takes float32, bfloat16 and float16, not torch.float64"
    )
