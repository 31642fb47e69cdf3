"""Softmax attention as prior: p_t(i) proportional to exp(<q_t, k_i> / sqrt(E) + bias)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.gates import EPS
from femixer.kernels.attend import Geometry
from femixer.kernels.backend import one_token
from femixer.kernels.gated_softmax import gated_softmax, serves
from femixer.kernels.softmax import softmax_read
from femixer.kernels.softmax_step import CACHE_HEADROOM, compiled_step, softmax_step
from femixer.layout import Layout, runs_together
from femixer.priors.base import Prior, Widths
from femixer.projection import Columns
from femixer.rotary import Turn, check_base, rotated
from femixer.state import Growing

ScoreBias = Callable[[Tensor, Tensor], Tensor]
CACHES = ("value", "exp")
# A windowed cache is cut when it is this much longer than twice the window.
FORGET_LATE = 64


class Alibi(nn.Module):
    """ALiBi as a score bias: head h adds -2^(-8 (h+1) / heads) * distance to the score."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        head = torch.arange(1, self.heads + 1, dtype=torch.float64, device=query.device)
        distance = (query[:, None, :, None] - key[:, None, None, :]).abs()
        return -(2.0 ** (-8.0 * head / self.heads))[:, None, None] * distance


class Stream(NamedTuple):
    """Cached values [B, G, S, D]; with `exponentials`, beside exp(beta (v - shift)) in one buffer of width 2D.

    shift [B, G, 1, D]: without exponentials the largest value so far.
    """

    data: Growing
    width: int
    exponentials: bool
    shift: Tensor | None = None

    @classmethod
    def of(cls, v: Tensor, beta: Tensor | None, exponentials: bool) -> Stream:
        shift = v.detach().amax(2, keepdim=True) if v.shape[2] else None
        exponentials = exponentials and beta is not None
        if exponentials and beta is not None and shift is not None:
            return cls(Growing.of(_beside(v, beta[:, None] * (v - shift))), v.shape[-1], True, shift)
        return cls(Growing.of(v.contiguous()), v.shape[-1], exponentials, shift)

    @property
    def values(self) -> Tensor:
        return self.data.tensor[..., : self.width]

    def append(self, v: Tensor, beta: Tensor | None) -> Stream:
        if v.shape[2] == 0:
            return self
        if self.shift is None:
            return Stream.of(v, beta, self.exponentials)
        if not self.exponentials or beta is None:
            shift = torch.maximum(self.shift, v.detach().amax(2, keepdim=True))
            return self._replace(data=self.data.append(v), shift=shift)
        above = beta[:, None] * (v - self.shift)
        if above.numel() and bool(above.amax() > CACHE_HEADROOM):
            return Stream.of(torch.cat([self.values, v], 2), beta, True)
        return self._replace(data=self.data.append(_beside(v, above)))

    def take(self, index: Tensor) -> Stream:
        return self._replace(data=self.data.take(index))


def _beside(v: Tensor, exponent: Tensor) -> Tensor:
    return torch.cat([v, exponent.exp()], -1)


class Cache(NamedTuple):
    """Rotated keys and the values of the past [B, G, S, .]; their runs [B, S] where there was padding or a segment;
    positions [1 or B, S] where a score bias asks for them."""

    keys: Growing
    stream: Stream
    run: Tensor | None
    position: Tensor | None


class SoftmaxPrior(Prior):
    """Rotary positions, grouped key/value heads, sliding window, score bias; causal or encoder.

    score_bias(query positions [B, T], key positions [B, S]) -> broadcastable to [B, H, T, S], added to the scores; a
    module may learn. cache: what a stream keeps besides the keys: "value" the values once, "exp" also exp(beta v),
    which is larger and faster.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        rope: bool = True,
        rope_base: float = 10000.0,
        window: int | None = None,
        score_bias: ScoreBias | None = None,
        cache: str = "value",
        **made: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **made)
        if cache not in CACHES:
            raise ValueError(f"cache={cache!r} is unknown; choose one of {', '.join(CACHES)}")
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ValueError(f"window={window!r} must be a positive number of tokens or None")
        check_base(rope_base)
        if score_bias is not None and not callable(score_bias):
            raise TypeError(f"score_bias={score_bias!r} must be callable: score_bias(query positions, key positions)")
        self.rope, self.rope_base, self.window, self.score_bias, self.cache = rope, rope_base, window, score_bias, cache

    def columns(self) -> dict[str, Columns]:
        width = self.widths.key
        return {"q": Columns(self.heads * width), "k": Columns(self.kv_heads * width)}

    def turn(self, position: Tensor) -> Turn | None:
        return Turn(position, self.widths.key, self.rope_base) if self.rope else None

    def _heads(self, inputs: dict[str, Tensor], position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, E] and keys [B, T, G, E] at their positions."""
        q, k, turn = inputs["q"], inputs["k"], self.turn(position)
        if turn is not None:
            return rotated(q, k, turn, dtype)
        return q.unflatten(-1, (-1, self.widths.key)).to(dtype), k.unflatten(-1, (-1, self.widths.key)).to(dtype)

    def _bias(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if self.score_bias is None else self.score_bias(query, key).to(dtype)

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        dtype = reading_dtype(v)
        v = v.to(dtype)
        beta = None if beta is None else beta.to(dtype)
        q, k = self._heads(inputs, layout.position, dtype)
        if state is None and not keep:
            runs = None if layout.run is None else (layout.run, layout.run)
            bias = self._bias(layout.position, layout.position, dtype)
            mean, free = softmax_read(q, k, v, beta, causal=self.causal, window=self.window, bias=bias, runs=runs)
            return mean, free, None
        if state is not None and self._sees_all(state, layout) and one_token(inputs["q"]):
            return self._step(q, k, v, beta, state)
        cache = self._append(state, k, v, beta, layout)
        bias = None if cache.position is None else self._bias(layout.position, cache.position, dtype)
        runs = None if cache.run is None else (cache.run[:, -q.shape[1] :], cache.run)
        if q.shape[1] == 1 and not torch.is_grad_enabled():
            if bias is not None:
                bias = bias.expand(q.shape[0], self.heads, 1, cache.keys.length)
            run_q, run_k = (None, None) if runs is None else runs
            geometry = Geometry(bias, run_q, run_k, True, self.window)
            stream = cache.stream
            mean, free = softmax_step(q, cache.keys, stream.data, stream.shift, beta, geometry)
        else:
            mean, free = self._whole(q, cache, beta, bias, runs)
        return mean, free, self._forget(cache)

    def gated_read(
        self,
        inputs: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        lam: Tensor | None,
        gate: Tensor | None,
        layout: Layout,
        state: Any,
        keep: bool,
    ) -> tuple[Tensor, Any]:
        sees_all = self.score_bias is None and (self.window is None or self.window >= v.shape[1])
        plain = sees_all and layout.run is None and state is None and not keep
        # Who has put another read in place of ours gets it.
        ours = type(self).read is SoftmaxPrior.read and "read" not in self.__dict__
        if plain and ours and beta is not None and serves(self.heads, self.widths.key, v, lam, gate):
            assert lam is not None
            assert gate is not None
            q, k = self._heads(inputs, layout.position, v.dtype)
            return gated_softmax(q, k, v, beta.to(v.dtype), lam, gate, self.causal, EPS), None
        return super().gated_read(inputs, v, beta, lam, gate, layout, state, keep)

    def _whole(
        self, q: Tensor, cache: Cache, beta: Tensor | None, bias: Tensor | None, runs: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The read of the cache's last tokens."""
        keys, values = cache.keys.tensor.transpose(1, 2), cache.stream.values.transpose(1, 2)
        return softmax_read(q, keys, values, beta, causal=True, window=self.window, bias=bias, runs=runs)

    def _sees_all(self, cache: Cache, layout: Layout) -> bool:
        """Whether the next token sees all of a cache that is not empty, by scores alone."""
        if cache.run is not None or layout.run is not None or self.score_bias is not None:
            return False
        return cache.keys.length > 0 and (self.window is None or self.window > cache.keys.length)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, cache: Cache
    ) -> tuple[Tensor, Tensor | None, Cache]:
        """One more token, written and read by one kernel."""
        stream = cache.stream
        assert stream.shift is not None  # the cache is not empty
        keys, data = cache.keys.longer(1), stream.data.longer(1)
        step = compiled_step(q, k, v, keys, data, stream.shift, beta)
        stream = stream._replace(data=data, shift=step.shift)
        if not step.fits:
            stream = Stream.of(stream.values, beta, True)
        cache = cache._replace(keys=keys, stream=stream)
        mean, free = (step.mean, step.free) if step.sound else self._whole(q, cache, beta, None, None)
        return mean, free, cache

    def _append(self, cache: Cache | None, k: Tensor, v: Tensor, beta: Tensor | None, layout: Layout) -> Cache:
        batch = k.shape[0]
        keys, v = k.transpose(1, 2), v.transpose(1, 2)
        position = None if self.score_bias is None else layout.position
        if cache is None:
            stream = Stream.of(v, beta, self.cache == "exp")
            return Cache(Growing.of(keys.contiguous()), stream, layout.run, position)
        run = runs_together(cache.run, cache.keys.length, layout.run, k)
        if position is not None and cache.position is not None:
            before = cache.position
            if before.shape[0] != position.shape[0]:
                before, position = before.expand(batch, -1), position.expand(batch, -1)
            position = torch.cat([before, position], 1)
        return Cache(cache.keys.append(keys), cache.stream.append(v, beta), run, position)

    def _forget(self, cache: Cache) -> Cache:
        """With a window, keep the last real tokens that a later query can see; seldom, so that it costs little."""
        window, length = self.window, cache.keys.length
        if window is None or length < 2 * window + FORGET_LATE:
            return cache
        keys = cache.keys.tensor
        index = torch.arange(length - window, length, device=keys.device).expand(keys.shape[0], -1)
        run = None
        if cache.run is not None:
            # Each row keeps its own; rows with fewer real tokens are filled up with padding.
            real = torch.arange(length, device=index.device).masked_fill(cache.run < 0, -1)
            index = real.topk(window, 1).values.flip(1)
            missing = index < 0
            index = index.clamp_min(0)
            run = cache.run.gather(1, index).masked_fill(missing, -1)
        position = cache.position
        if position is not None:
            position = position.expand(len(index), -1).gather(1, index)
        return Cache(cache.keys.take(index), cache.stream.take(index), run, position)

    def weights(
        self,
        inputs: dict[str, Tensor],
        layout: Layout,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        q, k = self._heads(inputs, layout.position, dtype)
        length = q.shape[1]
        rows = torch.arange(length, device=q.device) if rows is None else rows
        q = q[:, rows]
        k = k.repeat_interleave(self.heads // self.kv_heads, 2)
        scores = torch.einsum("bthe,bshe->bhts", q, k) * self.widths.key**-0.5
        bias = self._bias(layout.position[:, rows], layout.position, dtype)
        if bias is not None:
            scores = scores + bias
        key = torch.arange(length, device=q.device)
        seen = torch.ones(1, len(rows), length, dtype=torch.bool, device=q.device)
        rank = key[None]
        if layout.run is not None:
            run = layout.run
            seen = (run[:, rows, None] == run[:, None]) & (run[:, rows, None] >= 0)
            rank = (run >= 0).cumsum(1)
        if self.causal:
            seen = seen & (key <= rows[:, None])
        if self.window is not None:
            seen = seen & ((rank[:, rows, None] - rank[:, None]).abs() < self.window)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        return scores.softmax(-1).masked_fill(~seen[:, None], 0)


def reading_dtype(v: Tensor) -> torch.dtype:
    """The read runs in float32 or better; bfloat16 has float32's range and stays where its matrix products are fast."""
    if v.dtype == torch.bfloat16 and v.is_cuda:
        return v.dtype
    return torch.promote_types(v.dtype, torch.float32)
