"""The scan per channel on every backend against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.channel_scan import OPERATOR, channel_scan, definition
from femixer.kernels.marks import PADDING, START

from .backends import BACKENDS

ON_EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("name", ["keys and gates", "keys only", "the mean only", "values only", "any size"])
def test_exclusive_rows_read_what_came_before(backend: str, name: str) -> None:
    """As if the row's own token had no weight."""
    key, gate, v, beta, marks, _ = (
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in check.page(OPERATOR).examples()[name]
    )
    key = torch.zeros_like(v) if key is None else key
    given = [x.requires_grad_() for x in (key, gate, v, beta) if x is not None]
    with use_backend(backend):
        read = channel_scan(key, gate, v, beta, marks, exclusive=True)
    rows = []
    for t in range(v.shape[1]):
        alone = torch.arange(v.shape[1])[:, None] == t
        found = definition(key.masked_fill(alone, -torch.inf), gate, v, beta, marks, None)
        rows.append([x[:, t] if x.numel() else x for x in found[:3]])
    mean, free, log_total = (torch.stack(x, 1) for x in zip(*rows, strict=True))
    there = read.log_total > -torch.inf
    if marks is not None:
        there = there & ~(marks & PADDING).bool()[..., None]
    assert there.any() and not there[0, 0].any()
    results = []
    for each in ((read.mean, read.free, read.log_total), (mean, free, log_total)):
        shown = [torch.where(there, x, 0) for x in each if x is not None and x.numel()]
        loss = sum(
            (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(i))).sum() for i, x in enumerate(shown)
        )
        grads = torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True)
        results.append([*shown, *(torch.zeros_like(x) if g is None else g for x, g in zip(given, grads, strict=True))])
    for actual, wanted in zip(*results, strict=True):
        assert (actual - wanted).abs().max() <= 1e-9 * max(1.0, float(wanted.detach().abs().max()))


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
@ON_EVERY_BACKEND
def test_worked_out_by_hand_in_float32(
    key: list[float], gate: list[float], v: list[float], beta: float, free: float, backend: str
) -> None:
    given = (torch.tensor(x, dtype=torch.float32)[None, :, None] for x in (key, gate, v))
    with use_backend(backend):
        read = channel_scan(*given, torch.tensor([beta]))
    assert read.free is not None
    assert abs(read.free[0, -1, 0].item() - free) <= 1e-5 * max(1.0, abs(free))


@pytest.mark.parametrize("beta", [0.02, 0.05, 1.0])
@ON_EVERY_BACKEND
def test_a_long_slow_rise_does_not_add_up_rounding(beta: float, backend: str) -> None:
    v = torch.linspace(-5, 5, 16384)[None, :, None]
    with use_backend(backend):
        read = channel_scan(None, None, v, torch.tensor([beta]))
    b = torch.tensor(beta).double()
    wanted = ((b * v.double()).logsumexp(1) - math.log(16384)) / b
    assert (read.free[:, -1] - wanted).abs().max() <= 1e-5 * wanted.abs().clamp(min=1).max()


@ON_EVERY_BACKEND
def test_a_thousand_segments_keep_the_digits_of_each(backend: str) -> None:
    """Among them one whose weights and values are far above those of all others."""
    torch.manual_seed(0)
    key, gate, v = torch.randn(3, 1, 3000, 2)
    key[:, 300:303], v[:, 300:303] = 1e4, 1e4
    marks = torch.zeros(1, 3000, dtype=torch.int8)
    marks[:, ::3] = START
    beta = torch.tensor([0.05, 2.0])
    with use_backend(backend):
        read = channel_scan(key, -gate.abs(), v, beta, marks)
    apart = (x.reshape(1000, 3, 2) for x in (key, -gate.abs(), v))
    wanted = definition(*apart, beta, None, None)
    for actual, expected in zip(read[:3], wanted, strict=False):
        difference = (actual.reshape(1000, 3, 2) - expected).abs()
        assert (difference <= 1e-5 * expected.abs().clamp(min=1)).all()


@ON_EVERY_BACKEND
def test_no_gradient_crosses_a_segment(backend: str) -> None:
    given = [x.double().requires_grad_() for x in check.page(OPERATOR).examples()["keys and gates"][:4]]
    marks = torch.zeros(3, 37, dtype=torch.int8)
    marks[:, [0, 9, 20]] = START
    with use_backend(backend):
        read = channel_scan(*given, marks)
        for gradient in torch.autograd.grad((1e4 * read.mean + read.free)[:, 9:20].sum(), given[:3]):
            assert gradient[:, 9:20].count_nonzero() and not torch.cat([gradient[:, :9], gradient[:, 20:]], 1).any()


@ON_EVERY_BACKEND
def test_token_by_token_is_all_at_once(backend: str) -> None:
    key, gate, v, beta, marks, state = check.page(OPERATOR).examples()["with marks and state"]
    with use_backend(backend), torch.no_grad():
        whole = channel_scan(key, gate, v, beta, marks, state)
        rows = []
        for t in range(v.shape[1]):
            read = channel_scan(*(x[:, t : t + 1] for x in (key, gate, v)), beta, marks[:, t : t + 1], state)
            state = read.state
            rows.append(read)
    for i in range(3):
        torch.testing.assert_close(torch.cat([row[i] for row in rows], 1), whole[i], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole.state, rtol=1e-6, atol=1e-6)


def test_torch_func_sees_through_the_plain_form() -> None:
    key, gate, v, beta, marks, _ = check.page(OPERATOR).examples()["any size"]

    def loss(v: Tensor) -> Tensor:
        read = channel_scan(key, gate, v, beta, marks)
        return (read.mean + read.free).sum()

    wanted = torch.autograd.grad(loss(v.requires_grad_()), v)[0]
    torch.testing.assert_close(torch.func.grad(loss)(v.detach()), wanted, rtol=1e-4, atol=1e-4)
    mapped = torch.vmap(lambda v: channel_scan(key, gate, v, beta, marks).mean)(torch.stack([v, 2 * v]).detach())
    torch.testing.assert_close(mapped[1], channel_scan(key, gate, 2 * v, beta, marks).mean, rtol=1e-5, atol=1e-5)
