"""A softmax read as kernels take it: sizes, strides, tiles, and what is counted of its launches."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.softmax.triton_exact import NO_WINDOW
from femixer.kernels.softmax.triton_kernels import DECAYS, DENSE, split_sums
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.triton_launch import HALF_OR_SINGLE, launch, target_of

WIDEST = 128
# Sums of log decays that a program splits.
SPLIT = 1024
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class Gates(NamedTuple):
    """Logits [B, T, H, D] of the temperature and of the outer gate, and what is added to its mean square."""

    lam: Tensor | None
    gate: Tensor | None
    eps: float


class Tiles(NamedTuple):
    """Rows and keys of a tile, warps and stages of its program; channels that it multiplies at a time, 0 for all."""

    rows: int
    keys: int
    warps: int
    stages: int
    apart: int = 0


def refuse(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, seen: Visibility, *gates: Tensor | None) -> str | None:
    """Why kernels do not serve a read."""
    for x in (q, k, v, *gates):
        if x is not None and x.dtype not in HALF_OR_SINGLE:
            return f"it takes float32, bfloat16 and float16, not {x.dtype}"
    if q.dtype != k.dtype or q.dtype != v.dtype:
        return f"queries, keys and values must be of one type, not {q.dtype}, {k.dtype} and {v.dtype}"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"keys of {q.shape[3]} and values of {v.shape[3]} channels are too wide, {WIDEST} are the most"
    if k.shape[1] == 0:
        return "there are no keys"
    if (seen.causal or seen.window is not None) and q.shape[1] > k.shape[1]:
        return f"{q.shape[1]} queries are more than {k.shape[1]} keys"
    for x in (q, k, v, *gates):
        if x is not None and x.shape[1] * x.stride(1) >= 2**31:
            return f"a sequence spans {x.shape[1] * x.stride(1)} numbers, fewer than {2**31} are served"
    if (read := q.shape[1] * q.shape[2] * v.shape[3]) >= 2**31:
        return f"the read of a sequence has {read} numbers, fewer than {2**31} are served"
    for x in (seen.segments_q, seen.segments_k):
        if x is not None and x.dtype not in INTEGERS:
            return f"segments are integers, not {x.dtype}"
    return None


def padded(width: int) -> int:
    """Channels of a tile: a power of two, as matrix products want it."""
    return max(16, triton.next_power_of_2(width))


def side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class Call:
    """A read with what kernels ask of it. Tensors are as given, but their channels lie side by side."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, seen: Visibility, scale: float, gates: Gates | None
    ) -> None:
        self.q, self.k, self.v = side_by_side(q), side_by_side(k), side_by_side(v)
        self.beta = None if beta is None else beta.contiguous()
        self.seen, self.scale, self.gates = seen, scale, gates
        self.lam = None if gates is None or gates.lam is None else side_by_side(gates.lam)
        self.gate = None if gates is None or gates.gate is None else side_by_side(gates.gate)
        self.eps = 0.0 if gates is None else gates.eps
        self.batch, self.rows, self.heads, self.key_width = q.shape
        self.keys, self.groups, self.width = k.shape[1], k.shape[2], v.shape[3]
        self.repeats = self.heads // self.groups
        # Without order among them queries have no place among the keys.
        self.offset = self.keys - self.rows if seen.causal or seen.window is not None else 0
        self.window = 0 if seen.window is None else seen.window
        # Exponentials do not fit float16's range; float32 with TF32 products has as many digits.
        self.stream_dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
        self.of_queries, self.of_keys = (
            None if x is None else side_by_side(x) for x in (seen.segments_q, seen.segments_k)
        )

    @property
    def nothing(self) -> Tensor:
        """Stands for a tensor that a kernel does not read."""
        return self.q

    @cached_property
    def tiles(self) -> Tiles:
        """Of the forward read. Its keys are the blocks that share a top."""
        wide = max(padded(self.key_width), 2 * padded(self.width))
        small = target_of(self.q).startswith("gfx")
        if self.q.dtype == torch.float32:
            if wide <= 64:
                return Tiles(64, 32, 8, 1) if target_of(self.q) == "sm_100" else Tiles(64, 32, 4, 1 if small else 2)
            return Tiles(64, 32, 8, 1) if wide <= 128 and self.key_width <= 64 else Tiles(16, 32, 8, 1)
        if small:
            return Tiles(128 if wide <= 128 else 64, 64, 4 if 64 < wide <= 128 else 8, 1)
        widest = {"sm_100": 64, "sm_120": 32 if self.seen.decays else 128}.get(target_of(self.q), 128)
        return Tiles(128 if wide <= widest else 64, 64, 8, 2)

    @property
    def is_hopper(self) -> bool:
        """Whether the compiler takes the matrix units of sm_90 or sm_100, and other registers with them."""
        return target_of(self.q) in ("sm_90", "sm_100", "sm_103")

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.tiles.keys)

    @property
    def precision(self) -> str:
        """Of products of float32: three of TF32 have its digits; AMD's matrix units have float32 itself."""
        if target_of(self.q).startswith("gfx"):
            return "ieee"
        return "tf32" if self.q.dtype == torch.float16 else "tf32x3"

    def row_tiles(self, rows: int) -> int:
        """How many tiles, aligned by position."""
        return -(-(self.offset + self.rows) // rows) - self.offset // rows

    @cached_property
    def unit(self) -> int:
        """What all strides are multiples of."""
        given = [self.q, self.k, self.v, *(x for x in (self.lam, self.gate) if x is not None)]
        return math.gcd(16, *(s for x in given for s in x.stride()[:3]))

    def strides(self, x: Tensor | None) -> tuple[int, ...]:
        """Of batch, token and head, in units."""
        return (0, 0, 0) if x is None else tuple(s // self.unit for s in x.stride()[:3])

    @cached_property
    def rank(self) -> Tensor:
        """Real tokens up to a key [B, S], which windows count where there is padding."""
        if self.of_keys is None or self.seen.window is None:
            return self.q.new_empty(1, dtype=torch.int32)
        return (self.of_keys >= 0).cumsum(1, dtype=torch.int32)

    @cached_property
    def bias(self) -> Tensor | None:
        """What is added to scores [B, H, T, S], or sums of log decays in two parts [B, H, 2, S]."""
        bias = self.seen.bias
        if bias is None or not self.seen.decays:
            return bias
        parts = torch.empty(self.batch, self.heads, 2, self.keys, dtype=torch.float32, device=bias.device)
        count = self.batch * self.heads * self.keys
        launch(split_sums, (-(-count // SPLIT),), bias.contiguous(), parts, count, self.keys, BLOCK=SPLIT, num_warps=4)
        return parts

    @cached_property
    def masks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bias, segments of queries and of keys, rank."""
        segment = self.q.new_empty(1, dtype=torch.int64)  # of the type it has where there is one, as a rule
        segments = (segment if x is None else x for x in (self.of_queries, self.of_keys))
        return self.nothing if self.bias is None else self.bias, *segments, self.rank  # type: ignore[return-value]

    @cached_property
    def mask_strides(self) -> tuple[int, ...]:
        bias = (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        segments = (0 if x is None else x.stride(0) for x in (self.of_queries, self.of_keys))
        return *bias, *segments

    @cached_property
    def flags(self) -> dict[str, Any]:
        """What a kernel knows when it is compiled."""
        return {
            "HAS_BIAS": 0 if self.bias is None else DECAYS.value if self.seen.decays else DENSE.value,
            "SEGMENTS": self.of_keys is not None,
            "CAUSAL": self.seen.causal,
            "WINDOW": self.seen.window is not None,
            **self.widths,
        }

    @property
    def widths(self) -> dict[str, Any]:
        """Those of them that are not about who sees whom."""
        return {
            "UNIT": self.unit,
            "KEY_WIDTH": padded(self.key_width),
            "WIDTH": padded(self.width),
            "PRECISION": self.precision,
            "key_width": self.key_width,
            "width": self.width,
        }

    @property
    def seen_numbers(self) -> tuple[int, ...]:
        """Who sees whom as `triton_exact.SEEN`."""
        windowed, segmented = self.seen.window is not None, self.of_keys is not None
        kinds = self.bias is not None and not self.seen.decays, self.seen.decays, self.seen.causal, segmented
        return *map(int, kinds), int(windowed and segmented), self.window if windowed else NO_WINDOW

    @cached_property
    def gate_flags(self) -> dict[str, bool]:
        return {"GATED": self.gates is not None, "LAM": self.lam is not None, "GATE": self.gate is not None}

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys that are computed, of all heads; segments and windows over segments mask only."""
        t, s, back = self.rows, self.keys, self.offset
        per_row = s
        if self.seen.causal:
            per_row = back + (t + 1) // 2
        if self.seen.window is not None and self.of_keys is None:
            per_row = min(per_row, self.window * (1 if self.seen.causal else 2))
        return self.batch * self.heads * t * per_row

    def loaded(self, side: int) -> int:
        """Bytes that programs of a tile of `side` rows or keys load of those on the other side: what keys and values
        have of a token, or queries and gradients."""
        streams = 1 if self.beta is None else 2
        return self.pairs // side * (self.key_width + streams * self.width) * self.q.element_size()

    def bytes(self, *tensors: Tensor | None) -> int:
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)
