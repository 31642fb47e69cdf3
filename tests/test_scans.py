"""Kernels of the linear-time priors: compiled, plain torch and the definition agree, forwards and backwards."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matrix import SEGMENTS, Variant, _variants, assert_close, noise, outcome, streamed, tokens
from torch import Tensor

from femixer.kernels import backend, chunked
from femixer.kernels.chunked import chunked_read
from femixer.kernels.fast_weights import FastWeights, fast_weight_read
from femixer.kernels.recurrence import linear_recurrence
from femixer.kernels.running import empty_state, running_read
from femixer.layout import PADDING, START
from femixer.priors import PRIORS
from femixer.priors.directed import DirectedPrior

EXACT = 1e-9  # float64; the compiled logarithm is good to about 1e-10
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 131]  # around the chunks of 16 and 64 tokens


def marks_of(batch: int, length: int) -> Tensor:
    """Padding at the beginning, at the end and inside; segments of any length, none of which starts in row 0."""
    random = torch.rand(batch, length, generator=torch.Generator().manual_seed(length))
    marks = torch.zeros(batch, length, dtype=torch.int8)
    marks[random < 0.25] = PADDING
    marks[1:][random[1:] > 0.9] = START
    marks[-1, -1:] = PADDING
    return marks


def segment_until(marks: list[int], t: int) -> tuple[list[int], bool]:
    """Real tokens of row t's segment up to t, and whether what came before the sequence is part of it."""
    inside: list[int] = []
    continued = True
    for i, mark in enumerate(marks[: t + 1]):
        if mark == START:
            inside, continued = [], False
        if mark != PADDING:
            inside.append(i)
    return inside, continued


def decays(gate: Tensor, inside: list[int]) -> tuple[Tensor, Tensor]:
    """Sums of the gates [T, ...] of the tokens after each of those inside, and of all of them."""
    g = gate[inside]
    return g.flip(0).cumsum(0).flip(0) - g, g.sum(0)


def gradients(results: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results, and the gradients of a random functional of the finite ones."""
    loss = torch.zeros((), dtype=torch.float64)
    for seed, value in enumerate(results.values()):
        cotangent = noise(*value.shape, seed=50 + seed)
        loss = loss + (torch.where(value.isfinite(), value, 0).double() * cotangent).sum()
    found: Any = [None] * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zero = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), found, strict=True))
    kept = {name: value.detach().masked_fill(value == -torch.inf, -1e6) for name, value in results.items()}
    return kept | dict(zip([f"d {name}" for name in leaves], zero, strict=True))


def real_rows(x: Tensor, marks: Tensor | None) -> Tensor:
    """Without padding, of which a scan promises nothing."""
    return x if marks is None else x[marks != PADDING]


def agree(run: Callable[[bool], dict[str, Tensor]], wanted: dict[str, Tensor], tolerance: float = EXACT) -> None:
    """run(compiled) for both ways against the definition."""
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(backend, "_usable", False)
            try:
                assert_close(run(compiled), wanted, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{'compiled' if compiled else 'plain'}: {error}") from None


class Running:
    """running_read and its definition, on leaves of prime sizes."""

    BATCH, CHANNELS = 3, 5

    def __init__(self, length: int, marked: bool, given: str = "key gate beta state", scale: float = 1.0) -> None:
        shape = self.BATCH, length, self.CHANNELS
        self.marks = marks_of(*shape[:2]) if marked else None
        self.leaves = {"v": scale * noise(*shape, seed=1)}
        if "key" in given:
            self.leaves["key"] = scale * noise(*shape, seed=2)
        if "gate" in given:
            self.leaves["gate"] = -scale * noise(*shape, seed=3).abs()
        if "beta" in given:
            self.leaves["beta"] = 0.3 + noise(self.CHANNELS, seed=4).abs()
        if "state" in given:
            self.leaves["state"] = noise(3, self.BATCH, self.CHANNELS, seed=5)
            self.leaves["state"][2] = self.leaves["state"][1] + 0.5 if "beta" in given else 0
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def read(self, exclusive: bool) -> dict[str, Tensor]:
        x = self.leaves
        state = x.get("state", empty_state(x["v"]))
        read = running_read(x.get("key"), x.get("gate"), x["v"], x.get("beta"), self.marks, state, exclusive)
        return self.results(read.mean, read.free, read.log_total, None if exclusive else read.state)

    def results(self, mean: Tensor, free: Tensor | None, log_total: Tensor, last: Tensor | None) -> dict[str, Tensor]:
        log_total = real_rows(log_total, self.marks)
        found = {"mean": real_rows(mean, self.marks), "log total": log_total}
        if free is not None:  # where nothing is read it may be anything
            found["free"] = torch.where(log_total > -torch.inf, real_rows(free, self.marks), 0)
        if last is not None:
            found["state"] = last if free is not None else last[:2]
        return gradients(found, self.leaves)

    def definition(self, exclusive: bool) -> dict[str, Tensor]:
        v, beta = self.leaves["v"], self.leaves.get("beta")
        key, gate = (self.leaves.get(name, torch.zeros_like(v)) for name in ("key", "gate"))
        state = self.leaves.get("state", empty_state(v))
        zero, nothing = torch.zeros_like(v[0, 0]), torch.full_like(v[0, 0], -torch.inf)
        rows, last = [], []
        for b in range(v.shape[0]):
            marks = [0] * v.shape[1] if self.marks is None else self.marks[b].tolist()
            last.append(state[:, b])
            for t in range(v.shape[1]):
                inside, continued = segment_until(marks, t)
                if marks[t] == PADDING:
                    rows.append(torch.stack([zero, zero, zero]))
                    continue
                after, all_of_them = decays(gate[b], inside)
                read = inside[:-1] if exclusive else inside
                w, x, energy = (key[b, inside] + after)[: len(read)], v[b, read], v[b, read]
                if continued and "state" in self.leaves:
                    w, x, energy = (
                        torch.cat([old[None], new])
                        for old, new in ((state[0, b] + all_of_them, w), (state[1, b], x), (state[2, b], energy))
                    )
                if not len(w):
                    rows.append(torch.stack([nothing, zero, zero]))
                    continue
                total, mean = w.logsumexp(0), (w.softmax(0) * x).sum(0)
                free = zero if beta is None else ((w + beta * energy).logsumexp(0) - total) / beta
                rows.append(torch.stack([total, mean, free]))
                last[b] = rows[-1]
        log_total, mean, free = torch.stack(rows).unflatten(0, v.shape[:2]).unbind(2)
        final = None if exclusive else torch.stack(last, 1)
        return self.results(mean, None if beta is None else free, log_total, final)


class TestRunningRead:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("marked", [False, True])
    def test_it_is_its_definition(self, length: int, marked: bool):
        case = Running(length, marked)
        agree(lambda _: case.read(False), case.definition(False))

    @pytest.mark.parametrize(
        "given", ["key", "gate", "key beta", "gate beta", "key gate", "gate state", "key beta state", "beta"]
    )
    def test_without_some_of_the_arguments(self, given: str):
        case = Running(17, True, given)
        agree(lambda _: case.read(False), case.definition(False))

    @pytest.mark.parametrize("length", [1, 2, 17, 65])
    @pytest.mark.parametrize("marked", [False, True])
    @pytest.mark.parametrize("given", ["key gate beta", "gate", "key beta"])
    def test_exclusive_rows_read_what_came_before(self, length: int, marked: bool, given: str):
        case = Running(length, marked, given)
        agree(lambda _: case.read(True), case.definition(True))

    @pytest.mark.parametrize("marked", [False, True])
    def test_values_keys_and_gates_of_any_size(self, marked: bool):
        case = Running(37, marked, scale=40)
        agree(lambda _: case.read(False), case.definition(False), 1e-8)

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
    @pytest.mark.parametrize("compiled", [True, False])
    def test_worked_out_by_hand_in_float32(
        self, key: list, gate: list, v: list, beta: float, free: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(backend, "_usable", compiled)
        key, gate, v = (torch.tensor(x, dtype=torch.float32)[None, :, None] for x in (key, gate, v))
        read = running_read(key, gate, v, torch.tensor([beta]), None, empty_state(v))
        assert abs(read.free[0, -1, 0].item() - free) <= 1e-5 * max(1.0, abs(free))

    @pytest.mark.parametrize("beta", [0.02, 0.05, 1.0])
    @pytest.mark.parametrize("compiled", [True, False])
    def test_a_long_slow_rise_does_not_add_up_rounding(
        self, beta: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(backend, "_usable", compiled)
        v = torch.linspace(-5, 5, 16384)[None, :, None]
        read = running_read(None, None, v, torch.tensor([beta]), None, empty_state(v))
        b = torch.tensor(beta).double()
        wanted = ((b * v.double()).logsumexp(1) - math.log(16384)) / b
        assert (read.free[:, -1] - wanted).abs().max() <= 1e-5 * wanted.abs().clamp(min=1).max()


def multiplied_out(sums: Tensor, top: Tensor, width: int) -> Tensor:
    """The state without the shift of its exponentials, which may be any: [B, G, E, W]"""
    if sums.shape[-1] == width + 1:
        return sums
    return torch.cat([sums[..., : width + 1], sums[..., width + 1 :] * top.exp()[:, :, None]], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_grouped_heads_that_are_read_again_each_counts_once(dtype: torch.dtype):
    """The first head sees nothing but the low value at last, far below the top: it is doubtful, the second is not."""
    q, k, v = (torch.zeros(1, 2, heads, width, dtype=dtype) for heads, width in ((2, 2), (1, 2), (1, 1)))
    q[:, :, 0, 0] = q[:, :, 1, 1] = k[0, 0, 0, 1] = k[0, 1, 0, 0] = 1
    k[0, 1, 0, 1], v[0, 0] = 0.5, 100
    beta = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    _, free, _ = chunked_read(q, k, None, v, beta, None)
    free.sum().backward()
    # Only the second head's last token weighs two values, 2/3 on 100 and 1/3 on 0: dF/dbeta = -log(2/3) / beta^2.
    torch.testing.assert_close(free[0, 1, 1, 0].item(), 100 + math.log(2 / 3), rtol=1e-6, atol=0)
    torch.testing.assert_close(beta.grad.item(), -math.log(2 / 3), rtol=1e-4, atol=0)


class FastWeightCase:
    """fast_weight_read or chunked_read, and their definition by plain sums: values so large that float64 is."""

    BATCH, GROUPS, KEYS, WIDTH = 2, 3, 5, 2

    def __init__(
        self,
        length: int,
        marked: bool,
        gates: str,
        repeats: int = 1,
        given: str = "beta state",
        scale: float = 1.0,
    ) -> None:
        batch, groups, keys, width = self.BATCH, self.GROUPS, self.KEYS, self.WIDTH
        self.repeats, self.gates = repeats, gates
        self.marks = marks_of(batch, length) if marked else None
        self.leaves = {
            "q": 0.01 + noise(batch, length, groups * repeats, keys, seed=1).relu(),
            "k": 0.01 + noise(batch, length, groups, keys, seed=2).relu(),
            "v": scale * noise(batch, length, groups, width, seed=3),
        }
        if gates != "none":
            self.leaves["gate"] = -noise(batch, length, groups, keys if gates == "channel" else 1, seed=4).abs()
        if "beta" in given:
            self.leaves["beta"] = 0.3 + noise(groups, width, seed=5).abs()
        self.top = torch.full((batch, groups, width), -torch.inf, dtype=torch.float64)
        self.sums = torch.zeros(batch, groups, keys, 2 * width + 1 if "beta" in given else width + 1).double()
        if "state" in given:  # of seven tokens; relative to any shift
            key, value = noise(batch, groups, keys, 7, seed=7).abs(), scale * noise(batch, groups, 7, width, seed=8)
            streams = [value, torch.ones_like(value[..., :1])]
            if "beta" in given:
                exponent = self.leaves["beta"][:, None] * value
                self.top = exponent.amax(2) + noise(batch, groups, width, seed=6)
                streams.append((exponent - self.top[:, :, None]).exp())
            self.leaves["sums"] = self.sums = key @ torch.cat(streams, -1)
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def read(self, exclusive: bool) -> dict[str, Tensor]:
        x = self.leaves
        state = FastWeights(self.sums, self.top)
        read = fast_weight_read(
            x["q"], x["k"], x.get("gate"), x["v"], x.get("beta"), self.marks, state, exclusive
        )  # fmt: skip
        return self.results(read.mean, read.free, read.log_total, multiplied_out(*read.state, self.WIDTH))

    def read_chunked(self, exclusive: bool) -> dict[str, Tensor]:
        x = self.leaves
        gate = x["gate"][..., 0] if "gate" in x else None
        read = chunked_read(x["q"], x["k"], gate, x["v"], x.get("beta"), self.marks, exclusive)
        return self.results(*read, None)

    def results(self, mean: Tensor, free: Tensor | None, log_total: Tensor, last: Tensor | None) -> dict[str, Tensor]:
        log_total = real_rows(log_total, self.marks)
        found = {"mean": real_rows(mean, self.marks), "log total": log_total}
        if free is not None:
            found["free"] = torch.where(log_total[..., None] > -torch.inf, real_rows(free, self.marks), 0)
        if last is not None:
            found["state"] = last
        return gradients(found, self.leaves)

    def definition(self, exclusive: bool, final_state: bool = True) -> dict[str, Tensor]:
        q, k, v, beta = (self.leaves.get(name) for name in ("q", "k", "v", "beta"))
        gate = self.leaves.get("gate", torch.zeros_like(k)).expand_as(k)
        streams = torch.cat([v, torch.ones_like(v[..., :1]), *([] if beta is None else [(beta * v).exp()])], -1)
        before = multiplied_out(self.sums, self.top, self.WIDTH)
        rows, last = [], []
        for b in range(self.BATCH):
            marks = [0] * v.shape[1] if self.marks is None else self.marks[b].tolist()
            last.append(before[b])
            for t in range(v.shape[1]):
                inside, continued = segment_until(marks, t)
                if marks[t] == PADDING:
                    rows.append(torch.zeros(q.shape[2], streams.shape[-1], dtype=torch.float64))
                    continue
                after, all_of_them = decays(gate[b], inside)
                writes = (k[b, inside] * after.exp())[..., None] * streams[b, inside][:, :, None]  # [i, G, E, W]
                past = before[b] * all_of_them.exp()[..., None] * continued
                last[b] = past + writes.sum(0)
                seen = past + writes[:-1].sum(0) if exclusive else last[b]
                rows.append((q[b, t, :, None] @ seen.repeat_interleave(self.repeats, 0))[:, 0])
        y = torch.stack(rows).unflatten(0, v.shape[:2])  # [B, T, H, W]
        weighted, total, energy = y[..., : self.WIDTH], y[..., self.WIDTH], y[..., self.WIDTH + 1 :]
        there = total > 0
        total = torch.where(there, total, 1)
        mean = weighted / total[..., None]
        free = None
        if beta is not None:
            ratio = torch.where(there[..., None], energy, 1) / total[..., None]
            free = ratio.log() / beta.repeat_interleave(self.repeats, 0)
        log_total = torch.where(there, total.log(), -torch.inf)
        return self.results(mean, free, log_total, torch.stack(last) if final_state else None)


class TestFastWeightRead:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("gates", ["head", "channel"])
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_it_is_its_definition(self, length: int, gates: str, exclusive: bool):
        case = FastWeightCase(length, True, gates)
        agree(lambda _: case.read(exclusive), case.definition(exclusive))

    @pytest.mark.parametrize("gates", ["none", "head", "channel"])
    @pytest.mark.parametrize("exclusive", [False, True])
    @pytest.mark.parametrize("marked", [False, True])
    @pytest.mark.parametrize("given", ["", "beta", "state", "beta state"])
    def test_grouped_heads_and_without_some_of_the_arguments(
        self, gates: str, exclusive: bool, marked: bool, given: str
    ):
        case = FastWeightCase(19, marked, gates, repeats=2, given=given)
        agree(lambda _: case.read(exclusive), case.definition(exclusive))

    @pytest.mark.parametrize("gates", ["none", "head", "channel"])
    def test_values_of_any_size(self, gates: str):
        case = FastWeightCase(37, True, gates, repeats=2, scale=40)
        agree(lambda _: case.read(False), case.definition(False), 1e-8)

    def test_rows_that_fade_at_very_different_rates(self):
        """The shift of the exponentials follows the slowest row; the others must not be lost or overflow."""
        case = FastWeightCase(37, False, "channel", scale=10)
        with torch.no_grad():
            case.leaves["gate"] *= torch.tensor([0.0, 1.0, 5.0, 10.0, 0.01])
        agree(lambda _: case.read(False), case.definition(False))


class TestChunkedRead:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("gates", ["none", "head"])
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_it_is_its_definition(self, length: int, gates: str, exclusive: bool):
        case = FastWeightCase(length, False, gates, given="beta")
        agree(lambda _: case.read_chunked(exclusive), case.definition(exclusive, final_state=False))

    @pytest.mark.parametrize("gates", ["none", "head"])
    @pytest.mark.parametrize("exclusive", [False, True])
    @pytest.mark.parametrize("given", ["", "beta"])
    @pytest.mark.parametrize("length", [19, 65, 131])
    def test_marks_and_grouped_heads(self, gates: str, exclusive: bool, given: str, length: int):
        case = FastWeightCase(length, True, gates, repeats=2, given=given)
        agree(lambda _: case.read_chunked(exclusive), case.definition(exclusive, final_state=False))

    @pytest.mark.parametrize("gates", ["none", "head"])
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_a_wild_head_among_tame_ones_is_read_again(
        self, gates: str, exclusive: bool, monkeypatch: pytest.MonkeyPatch
    ):
        case = FastWeightCase(65, True, gates, repeats=2, given="beta")
        with torch.no_grad():
            case.leaves["v"][1, :, 2] *= 40
        again: list[list[tuple[int, int]]] = []
        found = chunked._again
        monkeypatch.setattr(chunked, "_again", lambda *args: again.append(found(*args)) or again[-1])
        agree(lambda _: case.read_chunked(exclusive), case.definition(exclusive, final_state=False), 1e-8)
        assert [(1, 2)] in again


class TestLinearRecurrence:
    @pytest.mark.parametrize("length", [*LENGTHS, 9, 10])
    def test_it_is_a_loop(self, length: int):
        decay, inputs, initial = noise(3, length, 5, seed=1).sigmoid(), noise(3, length, 5, seed=2), noise(3, 5, seed=3)
        decay[:, length // 2] = 0
        leaves = {"decay": decay, "inputs": inputs, "initial": initial}
        for leaf in leaves.values():
            leaf.requires_grad_()
        h, rows = initial, []
        for t in range(length):
            h = decay[:, t] * h + inputs[:, t]
            rows.append(h)
        actual = gradients({"h": linear_recurrence(decay, inputs, initial)}, leaves)
        assert_close(actual, gradients({"h": torch.stack(rows, 1)}, leaves), 1e-13)


VARIANTS = [v for name, kind in PRIORS.items() if issubclass(kind, DirectedPrior) for v in _variants(name)]
EVERY_VARIANT = pytest.mark.parametrize("variant", [pytest.param(v, id=f"{v.prior}-{v.name}") for v in VARIANTS])


def ways(m: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    found = {"eager": m, "segments": lambda x: m(x, segments=SEGMENTS)}
    if m.causal:
        found["stream"] = lambda x: streamed(m, x, [1, 4, 16, 1, 1])
    return found


class TestWithoutNumba:
    @EVERY_VARIANT
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_mixer_computes_the_same(self, variant: Variant, causal: bool, monkeypatch: pytest.MonkeyPatch):
        m, x = variant.build(causal=causal), tokens()
        assert backend.compiled(x)
        wanted = {name: outcome(m, way, x) for name, way in ways(m).items()}

        def unavailable(name: str) -> None:
            raise AssertionError(f"compiled kernel {name} was called")

        monkeypatch.setattr(backend, "_usable", False)
        for module in [module for name, module in sys.modules.items() if name.startswith("femixer.kernels.")]:
            if hasattr(module, "native"):
                monkeypatch.setattr(module, "native", unavailable)
        for name, way in ways(m).items():
            assert_close(outcome(m, way, x), wanted[name], 1e-10)

    def test_only_real_numbers_on_a_cpu_have_kernels(self):
        for dtype in (torch.float32, torch.float64):
            assert backend.compiled(torch.zeros(1, dtype=dtype))
            assert not backend.compiled(torch.zeros(1, dtype=dtype, device="meta"))
        assert not backend.compiled(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
class TestFork:
    def test_a_child_takes_the_plain_way_and_computes_the_same(self):
        mixers = [variant.build() for variant in VARIANTS if variant.name == "CLTG"]
        x = tokens()
        with torch.no_grad():
            wanted = [m(x) for m in mixers]
        assert backend.compiled(x)

        def child() -> bool:
            with torch.no_grad():
                same = all(torch.allclose(m(x), y, atol=1e-10) for m, y in zip(mixers, wanted, strict=True))
            return same and not backend.compiled(x)

        assert in_child(child)
        assert backend.compiled(x)


def in_child(function: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether function returns True in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} seconds")


@pytest.fixture(scope="module")
def functions() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """exp and log of the kernels, compiled as there."""
    import numba

    from femixer.kernels.native import primitives

    exp, log = primitives.exp, primitives.log
    options = {"fastmath": primitives.MATH, "error_model": "numpy"}

    @numba.njit(**options)
    def exps(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = exp(x[i])

    @numba.njit(**options)
    def logs(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = log(x[i])

    def run(kernel: Callable[..., None]) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            out = np.full(x.shape, np.nan)
            kernel(x, out)
            return out

        return call

    return {"exp": run(exps), "log": run(logs)}


class TestPrimitives:
    def test_exp_of_float32(self, functions: dict):
        x = np.concatenate([np.linspace(-86.999, 0, 200_001), -np.logspace(-30, 1.9, 10_001)]).astype(np.float32)
        error = functions["exp"](x) / np.exp(x.astype(np.float64)) - 1
        assert np.abs(error).max() < 2e-7
        near = -np.logspace(-30, -1, 2_001).astype(np.float32)  # 1 - exp(x) keeps its digits until float64 has none
        difference = functions["exp"](near) - 1 - np.expm1(near.astype(np.float64))
        assert (np.abs(difference) <= 2e-7 * np.abs(near) + 2.3e-16).all()

    def test_exp_of_float32_at_its_borders(self, functions: dict):
        least, single = np.float32(-87), np.float32
        x = np.array([0, -0.0, -np.inf, least, np.nextafter(least, single(0)), np.nextafter(least, single(-100)), -88,
                      -104, -1e4, -3e38], np.float32)  # fmt: skip
        found = functions["exp"](x)
        assert found[:3].tolist() == [1.0, 1.0, 0.0]
        assert found[4] == pytest.approx(math.exp(x[4]), rel=2e-7)
        assert found[[3, 5, 6, 7, 8, 9]].max() <= math.exp(-87) * (1 + 1e-6)
        assert found.min() >= 0.0
        assert found[7:].tolist() == [0.0, 0.0, 0.0]

    def test_exp_of_float64(self, functions: dict):
        x = np.concatenate([np.linspace(-700, 0, 100_001), [-np.inf, -1e4]])
        np.testing.assert_allclose(functions["exp"](x), np.exp(x), rtol=1e-15, atol=0)

    def test_log(self, functions: dict):
        spread = np.logspace(-307, 307, 100_001)
        near = 1 + np.concatenate([-np.logspace(-15, -0.5, 5_001), np.logspace(-15, 0, 5_001)])
        root = math.sqrt(0.5)
        borders = np.array(
            [root, np.nextafter(root, 0), np.nextafter(root, 1), math.sqrt(2), 1.0, 2.0, 0.5, 2.0**-1021]
        )
        tiny, largest = np.finfo(np.float64).tiny, np.finfo(np.float64).max
        for x in (spread, near, borders, np.ldexp(borders[:5], 500), np.array([tiny, largest])):
            found, wanted = functions["log"](x), np.log(x)
            assert np.abs(found - wanted).max() <= 1e-10 * max(1, np.abs(wanted).max())
        # Next to 1, where logarithms of shares are small and divided by beta, the error is relative.
        assert (np.abs(functions["log"](near) - np.log(near)) <= 1e-9 * np.abs(np.log(near))).all()
        assert functions["log"](np.array([1.0]))[0] == 0.0
