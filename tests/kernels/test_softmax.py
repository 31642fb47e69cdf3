"""The softmax read on every backend against its definition, its exact second read, its transforms, other devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, reads_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from femixer import use_backend
from femixer.kernels import check
from femixer.kernels.softmax import OPERATOR, attention, definition, exact, softmax_read, visibility, visible

from .backends import BACKENDS, examples

backends = pytest.mark.parametrize("backend", BACKENDS)


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(OPERATOR, backend, arguments, dtype)
    assert errors.worst < (2e-5 if dtype == torch.float32 else 1e-8), errors


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("queries", [7, 3])
def test_the_definition_sees_what_it_says(causal: bool, window: int | None, queries: int):
    segment, offset = [-1, 0, 0, -1, 0, 1, 1], 7 - queries
    rank = [sum(other >= 0 for other in segment[:i]) for i in range(7)]
    given = torch.tensor([segment])
    seen = visible(queries, 7, given[:, offset:], given, causal, window)
    for row in range(queries):
        at = row + offset
        for i in range(7):
            near = window is None or abs(rank[at] - rank[i]) < window
            wanted = segment[at] >= 0 and segment[i] == segment[at] and near and not (causal and i > at)
            assert bool(seen[0, row, i]) == wanted


@backends
@pytest.mark.parametrize("length", [5, 71])
def test_what_is_not_a_number_shows(backend: str, length: int):
    q, k, v = (noise(1, length, 2, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    k[0, 2, 0, 1] = torch.nan
    with use_backend(backend):
        mean, free = softmax_read(q, k, v, torch.ones(2, 4))
    assert mean[0, 2:, 0].isnan().all() and mean[0, :, 1].isfinite().all()
    assert free is not None and free[0, 2:, 0].isnan().all() and free[0, :, 1].isfinite().all()


@backends
@pytest.mark.parametrize("length", [40, 90])
@pytest.mark.parametrize("scores", [8.0, 900.0])
def test_a_value_counts_however_small_its_weight(backend: str, length: int, scores: float):
    """Weights far below what float32 and float64 hold, under values that make up for it: the whole sequence and every
    row of it alone, which is how a stream reads it again."""
    size = scores**0.5
    q, k = (size * noise(1, length, 2, 6, seed=seed, dtype=torch.float32) for seed in (0, 1))
    v, beta = 3000 * noise(1, length, 2, 5, seed=2, dtype=torch.float32), torch.full((2, 5), 0.7)
    given = None, None, None, True, None, 6**-0.5
    arguments = q, k, v, beta, *given
    _, wanted = definition(*arguments)
    with use_backend(backend):
        errors = check.compare(OPERATOR, backend, arguments)
        _, whole = softmax_read(q, k, v, beta)
        rows = [softmax_read(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], beta)[1] for t in range(length)]
    assert whole is not None
    for found in (whole, torch.cat(rows, 1)):
        assert ((found - wanted).abs() / wanted.abs().clamp(min=1)).max() <= 2e-5
    assert errors.worst < 1e-3, errors


@pytest.mark.parametrize("name", check.page(OPERATOR).examples())
def test_gradients_by_torch_func_are_the_definitions(name: str):
    """Transforms see through the plain form, which asks nothing: F falls back to the mean where sums underflow."""
    arguments = [
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in check.page(OPERATOR).examples()[name]
    ]
    at = tuple(i for i in range(5) if arguments[i] is not None)
    beyond = name in ("large values far apart", "huge values")

    def loss(*leaves: Tensor, read: Callable = OPERATOR) -> Tensor:
        given = list(arguments)
        for i, x in zip(at, leaves, strict=True):
            given[i] = x
        return sum((y.sin() * (1 + y.detach().isfinite())).sum() for y in read(*given)[:2])  # type: ignore[return-value]

    leaves = [arguments[i].clone().requires_grad_() for i in at]
    found = torch.func.grad(loss, argnums=tuple(range(len(at))))(*(x.detach() for x in leaves))
    wanted = torch.autograd.grad(loss(*leaves, read=definition), leaves)
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        if not beyond:
            assert_close({"x": a}, {"x": b}, 1e-10 * max(1.0, float(b.abs().max())))


def test_transforms_of_torch_func_see_through_it():
    q, k, v, beta = noise(3, 2, 7, 2, 6), noise(3, 2, 7, 2, 6, seed=1), noise(3, 2, 7, 2, 5, seed=2), noise(2, 5).exp()
    batched = torch.func.vmap(lambda *given: softmax_read(*given, beta))(q, k, v)
    alone = zip(*(softmax_read(*given, beta) for given in zip(q, k, v, strict=True)), strict=True)
    for found, wanted in zip(batched, alone, strict=True):
        assert_close({"x": found}, {"x": torch.stack(wanted)}, 1e-12)
    jacobian = torch.func.jacrev(lambda v: softmax_read(q[0], k[0], v, beta)[1])(v[0])
    given = None, None, None, True, None, 6**-0.5
    wanted = torch.autograd.functional.jacobian(lambda v: definition(q[0], k[0], v, beta, *given)[1], v[0])
    assert_close({"x": jacobian}, {"x": wanted}, 1e-12)


class TestOtherDevices:
    """What cannot be run here is checked by what it is made of."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("masked", [True, False])
    def test_the_written_out_backward_is_that_of_attention(self, causal: bool, masked: bool, monkeypatch):
        monkeypatch.setattr(attention, "SCORES", 100)  # several blocks of rows
        leaves = [noise(2, 3, 11, width, seed=width).requires_grad_() for width in (5, 6, 4)]
        leaves[1] = noise(2, 3, 11, 5, seed=6).requires_grad_()
        mask = noise(2, 3, 11, 11, seed=7).requires_grad_() if masked and not causal else None
        out = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, scale=0.3)
        grad = noise(*out.shape, seed=8)
        wanted = torch.autograd.grad(out, [*leaves, *([] if mask is None else [mask])], grad)
        given = [x.detach() for x in leaves]
        call = attention.Attended(*given, None if mask is None else mask.detach(), causal, 0.3, out.detach(), out)
        found = attention.written_out_backward(grad, call, mask is not None)
        for a, b in zip(found[: len(wanted)], wanted, strict=True):
            assert_close({"x": a}, {"x": b}, 1e-12)

    @pytest.mark.parametrize(
        ("options", "most"),
        [({}, (28, 40)), ({"window": 128}, (60, 95)), ({"segments": True}, (48, 55)), ({"causal": False}, (28, 40))],
        ids=["causal", "window", "segments", "encoder"],
    )
    def test_few_operations_and_no_question_to_the_device(self, options: dict, most: tuple[int, int]):
        """Tensors without data take a GPU's path; a question to the device raises."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device="meta", requires_grad=True)

        if options.get("segments"):
            options = {"segments": (torch.zeros(1, 4096, device="meta", dtype=torch.long),) * 2}
        leaves = empty(1, 4096, 8, 64), empty(1, 4096, 8, 64), empty(1, 4096, 8, 32), empty(8, 32)
        with Operations() as forward:
            mean, free = softmax_read(*leaves, **options)
        with Operations() as backward:
            grads = torch.autograd.grad((mean, free), leaves, (mean, free))
        assert [g.shape for g in grads] == [x.shape for x in leaves]
        assert forward.count <= most[0] and backward.count <= most[1]

    def test_the_mean_alone_is_read_in_half_precision_by_flash_attention(self):
        q, k, v = (torch.empty(1, 64, 8, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with Operations() as all_of_it:
            mean, _ = softmax_read(q, k, v)
            torch.autograd.grad(mean, (q, k, v), mean)
        assert "aten._scaled_dot_product_flash_attention_backward.default" in all_of_it.names

    def test_a_learned_bias_has_a_gradient_on_a_gpu(self):
        q, k, v = (torch.empty(1, 13, 2, 6, device="meta", requires_grad=True) for _ in range(3))
        beta, bias = torch.empty(2, 6, device="meta"), torch.empty(2, 13, 13, device="meta", requires_grad=True)
        mean, free = softmax_read(q, k, v, beta, bias=bias)
        assert torch.autograd.grad((mean, free), bias, (mean, free))[0].shape == bias.shape

    @pytest.mark.parametrize("size", [1.0, 300.0, 1e30])
    def test_beyond_its_range_it_stays_finite_between_mean_and_maximum(self, size: float):
        """The branch-free form that other devices take, through torch.func on a CPU."""
        q, k, v = noise(1, 37, 2, 6), noise(1, 37, 2, 6, seed=1), size * noise(1, 37, 2, 5, seed=2)
        q, k, v = (x.float() for x in (q, k, v))
        beta = torch.ones(2, 5)

        def read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
            mean, free = softmax_read(q, k, v, beta)
            assert free is not None
            return (free / size).sum(), (mean, free)

        grads, (mean, free) = torch.func.grad(read, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        assert free.isfinite().all() and (free >= mean).all()
        assert (free <= v.cummax(1).values + 1e-5 * size).all()
        assert all(g.isfinite().all() for g in grads)


class Operations(TorchDispatchMode):
    """Counts torch's operations that are not views."""

    VIEWS = ("view", "expand", "transpose", "slice", "select", "split", "squeeze", "alias", "detach", "permute")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(view in str(func) for view in self.VIEWS):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Who may see whom; inputs in float64.
GEOMETRIES: dict[str, dict] = {
    "causal": {},
    "encoder": {"causal": False},
    "window": {"window": 13},
    "encoder window": {"causal": False, "window": 13},
    "wide window": {"window": 200},
    "bias": {"bias": True},
    "encoder bias window": {"causal": False, "bias": True, "window": 70},
    "grouped": {"groups": 1},
    "grouped bias": {"groups": 2, "bias": True},
    "segments": {"segments": True},
    "encoder segments": {"segments": True, "causal": False},
    "segments window": {"segments": True, "window": 5},
    "encoder segments window bias grouped": {"segments": True, "causal": False, "window": 5, "bias": True, "groups": 1},
    "chunk": {"queries": 31},
    "one query": {"queries": 1},
    "chunk window": {"queries": 31, "window": 13},
    "chunk segments": {"queries": 31, "segments": True},
    "chunk segments window bias": {"queries": 31, "segments": True, "window": 5, "bias": True},
}
geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


class Case:
    """Random inputs of softmax_read for one geometry, and the same read by its definition."""

    def __init__(self, values: str = "tame", queries: int | None = None, groups: int = 4, length: int = 97, **geometry):
        heads, width, channels = 4, 6, 5
        queries = length if queries is None else queries
        self.geometry = {"causal": True, "window": None, "bias": None, "segments": None, **geometry}
        self.q, self.k = noise(2, queries, heads, width), noise(2, length, groups, width, seed=1)
        self.v, self.beta = noise(2, length, groups, channels, seed=2), noise(groups, channels, seed=3).exp()
        if values == "wild":
            index = torch.arange(length, dtype=torch.float64)
            self.v[..., 1] = (index * 40)[:, None]
            self.v[..., 2] = (-index * 40)[:, None]
            self.v[:, length * 2 // 3, :, 3] = 5e3
            self.v[..., 4] = 4e3 * (1 - 2 * (index % 2))[:, None]
        if self.geometry["bias"]:
            self.geometry["bias"] = noise(2, heads, queries, length, seed=4)
        if self.geometry["segments"]:
            segment = torch.zeros(2, length, dtype=torch.long)
            segment[0, 20:], segment[0, 21:], segment[0, 80:] = 1, 2, 3
            segment[1, 50:] = 1
            segment[0, :4] = segment[0, 30:36] = segment[1, -9:] = segment[1, 48:53] = -1
            self.geometry["segments"] = segment[:, length - queries :], segment

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (self.q, self.k, self.v, self.beta)] + (
            [] if self.geometry["bias"] is None else [self.geometry["bias"].clone().requires_grad_()]
        )

    def fast(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, bias: Tensor | None = None):
        return softmax_read(q, k, v, beta, **{**self.geometry, "bias": bias})

    def plain(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, bias: Tensor | None = None):
        of_queries, of_keys = self.geometry["segments"] or (None, None)
        given = of_queries, of_keys, self.geometry["causal"], self.geometry["window"]
        return definition(q, k, v, beta, bias, *given, q.shape[-1] ** -0.5)


def with_gradients(read: Callable, case: Case, with_beta: bool = True) -> dict[str, Tensor]:
    q, k, v, beta, *bias = case.leaves()
    mean, free = read(q, k, v, beta if with_beta else None, *bias)
    loss = (mean * noise(*mean.shape, seed=5)).sum()
    leaves = {"q": q, "k": k, "v": v, **({"bias": bias[0]} if bias else {})}
    if with_beta:
        loss = loss + (free * noise(*free.shape, seed=6)).sum()
        leaves["beta"] = beta
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    reads = {"mean": mean.detach(), **({"free": free.detach()} if with_beta else {})}
    return {**reads, **{f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}}


@pytest.fixture
def exact_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which functions of the exact path were called."""
    calls: list[str] = []
    for name in ("free_energy", "gradients"):

        def spied(name: str, inner: Callable) -> Callable:
            def call(*args):
                calls.append(name)
                return inner(*args)

            return call

        monkeypatch.setattr(exact, name, spied(name, getattr(exact, name)))
    return calls


class TestExactRead:
    @geometries
    def test_the_one_pass_read_is_the_definition(self, geometry: dict, exact_reads: list[str]):
        case = Case(**geometry)
        assert_close(with_gradients(case.fast, case), with_gradients(case.plain, case), 1e-10)
        assert "free_energy" not in exact_reads

    @geometries
    def test_the_mean_alone_is_the_definition(self, geometry: dict):
        case = Case(**geometry)
        fast, plain = (with_gradients(read, case, with_beta=False) for read in (case.fast, case.plain))
        assert_close(fast, plain, 1e-10)

    @geometries
    def test_the_exact_read_is_the_definition_for_values_of_any_range(self, geometry, exact_reads):
        case = Case("wild", **geometry)
        fast, plain = (with_gradients(read, case) for read in (case.fast, case.plain))
        assert_close(fast, plain, 1e-9)
        one_pass_suffices = geometry in ({"causal": False}, {"queries": 1})
        if not one_pass_suffices:
            assert exact_reads.count("free_energy") > 0
            assert exact_reads.count("gradients") > 0

    def test_small_values_at_small_temperatures_stay_on_the_fast_path(self, exact_reads: list[str]):
        case = Case()
        case.v, case.beta = 0.1 * case.v, 0.02 * case.beta
        assert_close(with_gradients(case.fast, case), with_gradients(case.plain, case), 1e-9)
        assert not exact_reads

    def test_exact_on_both_sides_of_where_sums_become_too_small(self):
        """Head h has a future value 16 + 4 h nats above the others; the smallest float32 is exp(-87)."""
        heads, length = 20, 211
        q, k = noise(1, length, heads, 6, dtype=torch.float32), noise(1, length, heads, 6, seed=1, dtype=torch.float32)
        beta = torch.tensor([[0.1, 0.3, 1.0]]).expand(heads, 3).contiguous()
        v = 0.5 * noise(1, length, heads, 3, seed=2, dtype=torch.float32)
        v[:, -1] = (16 + 4 * torch.arange(heads))[:, None] / beta
        _, free = softmax_read(q, k, v, beta)
        scores = torch.einsum("bthe,bshe->bhts", q.double(), k.double()) / math.sqrt(6)
        p = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        _, wanted = reads_of(p, v.double(), beta.double())
        assert ((free - wanted).abs() / wanted.abs().clamp(min=1))[:, :-1].max() <= 1e-5

    def test_only_heads_that_need_it_are_read_again(self, monkeypatch):
        case = Case()
        case.v[1, 60, 2, 0] = 1e6
        seen = []
        inner = exact.free_energy
        monkeypatch.setattr(exact, "free_energy", lambda s: seen.append(s.q.shape[0]) or inner(s))
        case.fast(case.q, case.k, case.v, case.beta)
        assert seen == [1]

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [None, 3, 100, 700])
    def test_blocks_of_keys_and_rows_cover_everything_once(self, causal: bool, window: int | None):
        """More tokens than a block of keys (512) and of rows (64) holds."""
        n, m = 601, 1187
        q, k, v, beta = noise(1, n, 3), noise(1, m, 3, seed=1), 300 * noise(1, m, 2, seed=2), noise(1, 2).exp()
        s = exact.Sequences(q, k, v, beta, None, causal, window, 0.4)
        row, key = torch.arange(m - n, m)[:, None], torch.arange(m)
        visible = torch.ones(n, m, dtype=torch.bool)
        visible &= (key <= row) | torch.tensor(not causal)
        if window is not None:
            visible &= (row - key).abs() < window
        p = (s.q @ s.k.mT * 0.4).masked_fill(~visible, -torch.inf).softmax(-1)
        _, wanted = reads_of(p[:, None], s.v[:, :, None], s.beta)
        assert_close({"F": exact.free_energy(s)}, {"F": wanted[:, :, 0]}, 1e-11)

    @pytest.mark.parametrize("size", [1e10, 1e30])
    @pytest.mark.parametrize("scores", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize("geometry", [{}, {"causal": False}, {"window": 5}, {"segments": True}, {"queries": 1}])
    def test_any_finite_input_gives_finite_results_between_mean_and_maximum(self, size, scores, geometry):
        case = Case(**geometry)
        q, k, v, beta = (
            x.float().requires_grad_() for x in (scores * case.q, scores * case.k, size * case.v, case.beta)
        )
        mean, free = case.fast(q, k, v, beta)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        bottom, top = (f(v, 1, keepdim=True) for f in (torch.amin, torch.amax))
        rounding = 1e-5 * size
        assert (mean <= free + rounding).all()
        assert (free <= top.clamp(min=0) + rounding).all()
        assert (mean >= bottom.clamp(max=0) - rounding).all()
        for gradient in torch.autograd.grad(free.sum() / size, (q, k, v, beta)):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("values", [0.0, 3.7, -1e4, 1e30])
    def test_constant_values_are_read_as_themselves(self, values: float):
        q, k = noise(2, 50, 2, 4, dtype=torch.float32), noise(2, 50, 2, 4, seed=1, dtype=torch.float32)
        v = torch.full((2, 50, 2, 3), values)
        mean, free = softmax_read(q, k, v, torch.tensor([[0.02, 1.0, 30.0]]).expand(2, 3).contiguous())
        assert ((free - values).abs() <= 1e-6 * max(1.0, abs(values))).all()
        assert ((mean - values).abs() <= 1e-6 * max(1.0, abs(values))).all()


@pytest.mark.parametrize("backend", ["plain", "numba"])
def test_channels_may_lie_anywhere_in_memory(backend: str) -> None:
    """torch's attention kernels take for granted that the channels of a head lie side by side."""
    torch.manual_seed(0)
    given = [torch.randn(2, 11, 3, 8), torch.randn(2, 11, 3, 8), torch.randn(2, 11, 3, 4)]
    results = []
    for spread in (False, True):
        tensors = [(x.mT.contiguous().mT if spread else x).detach().requires_grad_() for x in given]
        with use_backend(backend):
            mean, free = softmax_read(*tensors, torch.ones(3, 4), causal=True)
        results.append([mean, free, *torch.autograd.grad((mean + free).square().sum(), tensors)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(293, 293), (37, 211), (1, 5)])
def test_masks_of_decays_off_a_cpu_are_their_differences(
    queries: int, keys: int, last_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in one place, piece by piece, exactly as far as float32 can say, at sums where it has no digit left."""
    monkeypatch.setattr(visibility, "DECAY_ELEMENTS", 2 * 3 * 10_000)
    torch.manual_seed(0)
    until = -(20 * torch.rand(2, 3, keys, dtype=torch.float64)).cumsum(-1) - 1e7
    q, seen = torch.zeros(2, queries, 3, 5), visibility.Visibility(until.repeat(1, 1, 2), None, None, True, None)
    wanted = (until[..., keys - queries :, None] - until[..., None, :]).float()
    wanted = wanted.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), -torch.inf)
    starts = []
    for rows, columns, mask, _ in visibility._decayed(q, keys, seen, last_first):
        assert mask is not None
        assert torch.equal(mask, wanted[:, :, rows, columns])
        assert (wanted[:, :, rows, columns.stop :] == -torch.inf).all()
        assert mask.numel() <= max(2 * 3 * 10_000, 2 * 3 * 64 * keys)
        starts += list(range(rows.start, rows.stop))
    assert sorted(starts) == list(range(queries))


@pytest.mark.parametrize("repeats", [1, 2])
def test_decaying_scores_in_pieces_are_the_definition(repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients as off a CPU, the last rows first in the backward pass."""

    def pieces(q: Tensor, k: Tensor, seen: Any, last_first: bool = False) -> Any:
        return visibility._decayed(q, k.shape[1], seen, last_first)

    monkeypatch.setattr("femixer.kernels.softmax.plain.pieces", pieces)
    monkeypatch.setattr(visibility, "DECAY_ELEMENTS", 2 * 4 * 3_000)
    torch.manual_seed(0)
    length, heads, groups = 131, 4, 4 // repeats
    q, k, v = torch.randn(2, length, heads, 5), torch.randn(2, length, groups, 5), torch.randn(2, length, groups, 7)
    until = -torch.rand(2, heads, length, dtype=torch.float64).cumsum(-1)
    given = q, k, v, torch.rand(groups, 7) + 0.5, until.repeat(1, 1, 2), None, None, True, None, 0.4
    errors = check.compare(OPERATOR, "plain", given, torch.float32)
    assert errors.worst < 2e-5, errors
