"""Softmax attention as prior: p_t(i) proportional to exp(<q_t, k_i> / sqrt(E) + bias)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.gates import EPS
from femixer.kernels.gated_softmax import gated_softmax_read
from femixer.kernels.operator import handed_dtype
from femixer.kernels.softmax import reading_dtype, softmax_read
from femixer.kernels.softmax_step import HEADROOM, TOO_LARGE, softmax_step
from femixer.layout import Layout, segments_together
from femixer.priors.base import Prior, Widths, decay_between
from femixer.projection import Columns
from femixer.rotary import Rotation, check_base, rotated
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
    """Cached values [B, G, S, D]; with `exponentials`, together with exp(beta (v - shift)) in one buffer of width 2D.

    shift [B, G, 1, D]: without exponentials, the largest value so far. Exponentials are kept on a CPU only: whether the
    shift is still large enough depends on the data, so another device would have to wait for the answer, and a
    compiler cannot know it.
    """

    data: Growing
    width: int
    exponentials: bool
    shift: Tensor | None = None

    @classmethod
    def of(cls, v: Tensor, beta: Tensor | None, exponentials: bool) -> Stream:
        shift = v.detach().amax(2, keepdim=True) if v.shape[2] else None
        exponentials = exponentials and beta is not None and v.device.type == "cpu"
        exponentials = exponentials and not torch.compiler.is_compiling()
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
        if self.exponentials and torch.compiler.is_compiling():
            return Stream.of(torch.cat([self.values, v], 2), beta, False)
        if not self.exponentials or beta is None:
            shift = torch.maximum(self.shift, v.detach().amax(2, keepdim=True))
            return self._replace(data=self.data.append(v), shift=shift)
        above = beta[:, None] * (v - self.shift)
        if above.numel() and bool(above.amax() > HEADROOM):
            return Stream.of(torch.cat([self.values, v], 2), beta, True)
        return self._replace(data=self.data.append(_beside(v, above)))

    def take(self, index: Tensor) -> Stream:
        return self._replace(data=self.data.take(index))


def _beside(v: Tensor, exponent: Tensor) -> Tensor:
    return torch.cat([v, exponent.exp()], -1)


class Cache(NamedTuple):
    """The past of a stream: rotated keys and values [B, G, S, .]; segments [B, S] if there was padding or more than one
    segment; positions [1 or B, S] if a score bias needs them; cumulative log decays [B, H, S, 1] if scores decay."""

    keys: Growing
    stream: Stream
    segment: Tensor | None
    position: Tensor | None
    sums: Growing | None = None


class SoftmaxPrior(Prior):
    """Softmax attention with rotary positions, grouped key/value heads, window and score bias; causal or encoder.

    score_bias(query positions [B, T], key positions [B, S]) returns a tensor broadcastable to [B, H, T, S], which is
    added to the scores; it may be a module with parameters. cache: what a stream keeps besides the keys: "value" the
    values, "exp" also exp(beta v), which is larger and faster.
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
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **factory_kwargs)
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

    def _heads(self, inputs: dict[str, Tensor], position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, E] and keys [B, T, G, E], rotated to their positions."""
        q, k = inputs["q"], inputs["k"]
        if self.rope:
            return rotated(q, k, Rotation(position, self.widths.key, self.rope_base), dtype)
        return q.unflatten(-1, (-1, self.widths.key)).to(dtype), k.unflatten(-1, (-1, self.widths.key)).to(dtype)

    def log_decays(self, inputs: dict[str, Tensor], layout: Layout) -> Tensor | None:
        """Log decay of earlier tokens' scores at each token, or None: [B, T, H] <= 0, float64, zero at padding."""
        return None

    def _decays(self, decay: Tensor | None, layout: Layout) -> Tensor | None:
        """Sums of log decays before each token and up to it, [B, H, 2 T]."""
        if decay is None:
            return None
        until = _sums(decay, layout)
        # A causal layer reads nothing ahead, so it does not use the sums before a token.
        before = until if self.causal else until - decay
        return torch.cat([before, until], 1).transpose(1, 2)

    def _bias(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if self.score_bias is None else self.score_bias(query, key).to(dtype)

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        q, k, v, beta = self._read_from(inputs, v, beta, layout)
        decay = self.log_decays(inputs, layout)
        if state is None and not keep:
            visible = self._visible(layout, q.dtype)
            mean, free = softmax_read(q, k, v, beta, causal=self.causal, decays=self._decays(decay, layout), **visible)
            return mean, free, None
        one_more = state is not None and state.stream.shift is not None and q.shape[1] == 1
        if one_more and not torch.is_grad_enabled():
            mean, free, cache = self._step(q, k, v, beta, layout, state, decay)
        else:
            cache = self._append(state, k, v, beta, layout, decay)
            keys, values = cache.keys.tensor.transpose(1, 2), cache.stream.values.transpose(1, 2)
            # Nothing ahead is read, so the sums before a token are not used.
            decays = None if cache.sums is None else cache.sums.tensor[..., 0].repeat(1, 1, 2)
            mean, free = softmax_read(q, keys, values, beta, decays=decays, **self._visible(layout, q.dtype, cache))
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
        """`read` and the gates, as one operator unless the tokens are part of a stream."""
        if state is not None or keep:
            return super().gated_read(inputs, v, beta, lam, gate, layout, state, keep)
        q, k, v, beta = self._read_from(inputs, v, beta, layout, handed_dtype(v))
        gates = None if lam is None else lam.to(v.dtype), None if gate is None else gate.to(v.dtype)
        visible = self._visible(layout, v.dtype)
        decays = self._decays(self.log_decays(inputs, layout), layout)
        return gated_softmax_read(q, k, v, beta, gates, EPS, causal=self.causal, decays=decays, **visible), None

    def _read_from(
        self,
        inputs: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        layout: Layout,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values in `dtype` (default: that of the read); beta in float32 or better."""
        dtype = reading_dtype(v, beta) if dtype is None else dtype
        q, k = self._heads(inputs, layout.position, dtype)
        beta = None if beta is None else beta.to(torch.promote_types(v.dtype, torch.float32))
        return q, k, v.to(dtype), beta

    def _visible(self, layout: Layout, dtype: torch.dtype, cache: Cache | None = None) -> dict[str, Any]:
        """Window, segments and score bias: which keys a query of the layout may read, apart from causality. They are
        the layout's, or those of a cache whose last tokens are the layout's."""
        segment, position = layout[:2] if cache is None else (cache.segment, cache.position)
        segments = None if segment is None else (segment[:, -layout.position.shape[1] :], segment)
        bias = None if position is None else self._bias(layout.position, position, dtype)
        return {"window": self.window, "segments": segments, "bias": bias}

    def _visible_to_one(self, cache: Cache, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
        """The same for the last token alone, with the decays since earlier tokens as its bias."""
        visible = self._visible(layout, dtype, cache)
        if cache.sums is not None:
            until = cache.sums.tensor[..., 0]
            visible["bias"] = (until[..., -1:] - until)[:, :, None].to(dtype)
        return visible

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        layout: Layout,
        cache: Cache,
        decay: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Cache]:
        """One more token, without gradients: append to the cache and read from it in one operator."""
        if torch.compiler.is_compiling():
            cache = self._append(cache, k, v, beta, layout, decay)
            shift, visible = cache.stream.shift, self._visible_to_one(cache, layout, q.dtype)
            assert shift is not None
            entries = cache.keys.tensor, cache.stream.data.tensor, shift
            mean, free, _, _ = softmax_step(q, None, entries, beta, cache.keys.length, **visible)
            return mean, free, cache
        keys, data, shift = cache.keys.longer(1), cache.stream.data.longer(1), cache.stream.shift
        assert shift is not None
        segment, position = self._places(cache, k, layout)
        cache = Cache(keys, cache.stream._replace(data=data), segment, position, _grown(cache.sums, decay, layout))
        visible = self._visible_to_one(cache, layout, q.dtype)
        mean, free, shift, doubt = softmax_step(
            q, (k, v), (keys.buffer, data.buffer, shift), beta, keys.length, **visible
        )
        stream = cache.stream._replace(shift=shift)
        if stream.exponentials and bool((doubt == TOO_LARGE).any()):
            stream = Stream.of(stream.values, beta, True)
        return mean, free, cache._replace(stream=stream)

    def _append(
        self, cache: Cache | None, k: Tensor, v: Tensor, beta: Tensor | None, layout: Layout, decay: Tensor | None
    ) -> Cache:
        keys, v = k.transpose(1, 2), v.transpose(1, 2)
        if cache is None:
            stream = Stream.of(v, beta, self.cache == "exp")
            position = None if self.score_bias is None else layout.position
            return Cache(Growing.of(keys.contiguous()), stream, layout.segment, position, _grown(None, decay, layout))
        stream, sums = cache.stream.append(v, beta), _grown(cache.sums, decay, layout)
        return Cache(cache.keys.append(keys), stream, *self._places(cache, k, layout), sums)

    def _places(self, cache: Cache, k: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Segments and positions of the cached tokens and of those of the layout."""
        segment = segments_together(cache.segment, cache.keys.length, layout.segment, k)
        before, position = cache.position, layout.position
        if before is None:
            return segment, None
        if before.shape[0] != position.shape[0]:
            before, position = before.expand(k.shape[0], -1), position.expand(k.shape[0], -1)
        return segment, torch.cat([before, position], 1)

    def _forget(self, cache: Cache) -> Cache:
        """With a window, drop tokens that no later query can see; rarely, to amortize the cost."""
        window, length = self.window, cache.keys.length
        if window is None or length < 2 * window + FORGET_LATE:
            return cache
        keys = cache.keys.tensor
        index = torch.arange(length - window, length, device=keys.device).expand(keys.shape[0], -1)
        segment = None
        if cache.segment is not None:
            # Each row keeps its own last real tokens; rows with fewer are filled up with padding.
            real = torch.arange(length, device=index.device).masked_fill(cache.segment < 0, -1)
            index = real.topk(window, 1).values.flip(1)
            missing = index < 0
            index = index.clamp_min(0)
            segment = cache.segment.gather(1, index).masked_fill(missing, -1)
        position = cache.position
        if position is not None:
            position = position.expand(len(index), -1).gather(1, index)
        sums = None if cache.sums is None else cache.sums.take(index)
        return Cache(cache.keys.take(index), cache.stream.take(index), segment, position, sums)

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
        decay = self.log_decays(inputs, layout)
        if decay is not None:
            scores = scores + decay_between(decay.to(dtype), rows).permute(0, 3, 1, 2)
        seen = self.visible(layout, rows)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        return scores.softmax(-1).masked_fill(~seen[:, None], 0)

    def visible(self, layout: Layout, rows: Tensor) -> Tensor:
        seen = super().visible(layout, rows)
        if self.window is None:
            return seen
        rank = torch.arange(seen.shape[2], device=rows.device)[None]
        if layout.segment is not None:
            rank = (layout.segment >= 0).cumsum(1)
        return seen & ((rank[:, rows, None] - rank[:, None]).abs() < self.window)


def _sums(decay: Tensor, layout: Layout) -> Tensor:
    """Cumulative log decays [B, T, H], restarting in every segment.

    By doubling: sums of the last 1, 2, 4, ... tokens. Nothing is added across a segment's start, and no gradient
    crosses it.
    """
    if layout.starts is None:
        return decay.cumsum(1)
    segment, until, tokens = layout.starts.cumsum(1)[..., None], decay, 1
    while tokens < decay.shape[1]:
        earlier = until[:, :-tokens].masked_fill(segment[:, :-tokens] != segment[:, tokens:], 0)
        until = torch.cat([until[:, :tokens], until[:, tokens:] + earlier], 1)
        tokens *= 2
    return until


def _grown(sums: Growing | None, decay: Tensor | None, layout: Layout) -> Growing | None:
    """Cumulative log decays [B, H, S, 1] of earlier tokens, extended by those of `decay` [B, T, H]."""
    if decay is None or decay.shape[1] == 0:
        return sums
    until = _sums(decay, layout).transpose(1, 2)[..., None]
    if sums is None:
        return Growing.of(until.contiguous())
    before = sums.tensor[:, :, -1:]
    if layout.starts is not None:
        before = before.masked_fill(layout.starts.cumsum(1)[:, None, :, None] > 0, 0)
    return sums.append(before + until)
