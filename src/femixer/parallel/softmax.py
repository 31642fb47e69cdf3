"""The softmax prior of a sequence that is cut over ranks: queries stay, keys and values come from the other ranks.

Either they are gathered (windows, which count tokens, biases and decays always are), or they go around a ring: each
rank reads its queries from the stretches of one rank at a time and merges what it has read. Two sets of keys with
normalizers Z, means mu and free energies F are together

    Z = Z_1 + Z_2,   mu = (Z_1 mu_1 + Z_2 mu_2) / Z,   F = log((Z_1 exp(beta F_1) + Z_2 exp(beta F_2)) / Z) / beta.

What is kept for the backward is this rank's own keys and values. Those of the others come once more there; in a ring,
gradients of keys and values travel with them until they are back where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from femixer.kernels.softmax import plain, softmax_read
from femixer.kernels.softmax.visibility import Visibility
from femixer.layout import Layout
from femixer.parallel.cut import Cut, Passing
from femixer.priors.base import Prior
from femixer.priors.softmax import SoftmaxPrior


def ring_read(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, segment: Tensor | None, cut: Cut, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Mean and free energy [B stretches, T, H, D] of this rank's queries over the keys and values of all ranks.

    q [B stretches, T, H, E]; k, v [.., G, E or D]; beta [G, D]; segment [B stretches, T], negative is padding.
    """
    mean, free = _Ring.apply(q, k, v, beta, segment, cut, causal)
    return mean, None if beta is None else free


class Partial(NamedTuple):
    """A read from some of the keys, in float64: logarithm of the normalizer [B, T, H, 1], -inf where nothing is seen;
    mean and free energy [B, T, H, D]."""

    log_total: Tensor
    mean: Tensor
    free: Tensor | None


def merged(one: Partial, other: Partial, beta: Tensor | None) -> Partial:
    """The read from both sets of keys; beta [H, D]."""
    total = torch.logaddexp(one.log_total, other.log_total)
    shares = [part.log_total - total.masked_fill(total == -torch.inf, 0) for part in (one, other)]
    mean = shares[0].exp() * one.mean + shares[1].exp() * other.mean
    if beta is None or one.free is None or other.free is None:
        return Partial(total, mean, None)
    energy = torch.logaddexp(shares[0] + beta * one.free, shares[1] + beta * other.free) / beta
    return Partial(total, mean, energy.masked_fill(total == -torch.inf, 0))


class _Meeting(NamedTuple):
    """One of this rank's stretches of queries and one stretch of keys, as the read takes them, and what it returned."""

    number: int
    other: int
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]

    def partial(self) -> Partial:
        mean, free, log_z = self.results[:3]
        log_total = log_z.transpose(1, 2)[..., None].double()
        if (of_queries := self.arguments[5]) is not None:
            log_total = log_total.masked_fill((of_queries < 0)[..., None, None], -torch.inf)
        return Partial(log_total, mean.double(), free.double() if free.numel() else None)


def _meetings(
    q: Tensor, beta: Tensor | None, segment: Tensor | None, guests: list[Tensor], source: int, cut: Cut, causal: bool
) -> Iterator[_Meeting]:
    """Of this rank's queries with the stretches of rank `source`: guests are its keys, values and segments."""
    k, v, *of_guests = guests
    for number, place in enumerate(cut.places):
        for other, there in enumerate(cut.places_of(source)):
            if causal and there > place:
                continue
            keys, values, queries = (
                cut.one_of_folded(x, i).contiguous() for x, i in ((k, other), (v, other), (q, number))
            )
            of_queries = of_keys = None
            if segment is not None:
                of_keys = cut.one_of_folded(of_guests[0], other)
                of_queries = _with_keys(cut.one_of_folded(segment, number), of_keys)
            seen = Visibility(None, of_queries, of_keys, causal and there == place, None)
            scale = q.shape[-1] ** -0.5
            arguments = queries, keys, values, beta, *seen, scale
            yield _Meeting(number, other, arguments, plain.forward(*arguments))


def _with_keys(queries: Tensor, keys: Tensor) -> Tensor:
    """Segments of queries, as padding where no key is of the same. Segments are numbered in order, so those of a
    stretch are all between its first and its last."""
    last = keys.amax(1, keepdim=True)
    first = keys.masked_fill(keys < 0, torch.iinfo(keys.dtype).max).amin(1, keepdim=True)
    return queries.masked_fill((queries < first) | (queries > last), -1)


def _around(guests: list[Tensor], cut: Cut) -> Iterator[tuple[int, list[Tensor]]]:
    """The tensors of every rank, this one's first, while the next are on their way."""
    ranks, rank = cut.ranks, distributed.get_rank(cut.group)
    for step in range(ranks):
        passing = Passing(guests, cut.group) if step + 1 < ranks else None
        yield (rank - step) % ranks, guests
        if passing is not None:
            guests = passing.arrived()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, segment: Tensor | None, cut: Cut, causal: bool
    ) -> tuple[Tensor, Tensor]:
        warmth = None if beta is None else _per_head(beta, q).double()
        reads: list[Partial | None] = [None] * cut.stretches
        for source, guests in _around([k, v] if segment is None else [k, v, segment], cut):
            for meeting in _meetings(q, beta, segment, guests, source, cut, causal):
                before, here = reads[meeting.number], meeting.partial()
                reads[meeting.number] = here if before is None else merged(before, here, warmth)
        parts = zip(*(read for read in reads if read), strict=True)
        whole = [cut.of_stretches([*part]) for part in parts if part[0] is not None]
        log_total, mean = whole[:2]
        free = mean.new_empty(0) if beta is None else torch.maximum(whole[2], mean)  # but for rounding
        ctx.save_for_backward(q, k, v, beta, segment, log_total, mean, free)
        ctx.cut, ctx.causal = cut, causal
        ctx.set_materialize_grads(True)
        return mean.to(v.dtype), free.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, to_mean: Tensor, to_free: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, segment, log_total, mean, free = ctx.saved_tensors
        cut: Cut = ctx.cut
        warmth = None if beta is None else _per_head(beta, q).double()
        total = log_total.masked_fill(log_total == -torch.inf, 0)
        read = Upstream(total, mean, free, to_mean.double(), to_free.double(), warmth)
        dq, to_beta = torch.zeros_like(q), torch.zeros_like(mean[0, 0])
        dbeta = None if beta is None else torch.zeros_like(beta)
        guests = [k, v] if segment is None else [k, v, segment]
        travelling = [torch.zeros_like(k), torch.zeros_like(v)]
        for source, here in _around(guests, cut):
            for meeting in _meetings(q, beta, segment, here, source, cut, ctx.causal):
                grads, direct = read.of_stretch(cut, meeting.number).to(meeting.partial())
                grads = tuple(x.to(q.dtype) for x in grads)
                found: Any = plain.backward(grads, meeting.arguments, meeting.results, (True,) * 10)
                cut.one_of_folded(dq, meeting.number).add_(found[0])
                for target, grad in zip(travelling, found[1:3], strict=True):
                    cut.one_of_folded(target, meeting.other).add_(grad)
                if dbeta is not None:
                    dbeta += found[3]
                    to_beta += direct
            # They go on with the keys and values they belong to, once more at the end: home.
            travelling = Passing(travelling, cut.group).arrived()
        if dbeta is not None:
            dbeta += to_beta.unflatten(0, (dbeta.shape[0], -1)).sum(1).to(dbeta.dtype)
        return dq, *travelling, dbeta, None, None, None


class Upstream(NamedTuple):
    """A whole read, its gradients, and beta [H, D]."""

    log_total: Tensor
    mean: Tensor
    free: Tensor
    to_mean: Tensor
    to_free: Tensor
    beta: Tensor | None

    def of_stretch(self, cut: Cut, number: int) -> Upstream:
        named = zip(self._fields[:5], self[:5], strict=True)
        return self._replace(**{name: cut.one_of_folded(x, number) if x.numel() else x for name, x in named})

    def to(self, part: Partial) -> tuple[tuple[Tensor, ...], Tensor]:
        """Gradients of a part's mean, free energy and log-normalizer [B, H, T], and what beta has from the merge.

        With the part's share w = Z_b / Z of the prior and u = w exp(beta (F_b - F)) of the posterior,
        dmu/dmu_b = w, dF/dF_b = u, dmu/dlog Z_b = w (mu_b - mu), dF/dlog Z_b = (u - w) / beta.
        """
        share = (part.log_total - self.log_total).exp()
        to_mean = share * self.to_mean
        to_log_z = to_mean * (part.mean - self.mean)
        if self.beta is None or part.free is None:
            return (to_mean, to_mean, to_log_z.sum(-1).transpose(1, 2)), torch.zeros_like(self.mean[0, 0])
        above = part.free - self.free
        posterior = (part.log_total - self.log_total + self.beta * above).exp()
        to_free = posterior * self.to_free
        to_log_z = to_log_z + (to_free - share * self.to_free) / self.beta
        return (to_mean, to_free, to_log_z.sum(-1).transpose(1, 2)), (to_free * above / self.beta).sum((0, 1))


def _per_head(beta: Tensor, q: Tensor) -> Tensor:
    return beta.repeat_interleave(q.shape[2] // beta.shape[0], 0)


class CutSoftmax(SoftmaxPrior):
    cut: Cut

    def gated_read(self, *given: Any) -> tuple[Tensor, Any]:
        return Prior.gated_read(self, *given)

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        q, k, v, beta = self._read_from(inputs, v, beta, layout)
        if q.shape[0] == 0 or q.shape[1] == 0:
            nothing = q.new_zeros(*q.shape[:-1], v.shape[-1])
            return nothing, None if beta is None else nothing, None
        decay = self.log_decays(inputs, layout)
        if self.cut.ring and self.window is None and self.score_bias is None and decay is None:
            return *ring_read(q, k, v, beta, layout.segment, self.cut, self.causal), None
        keys, values = (self.cut.whole_of_folded(x) for x in (k, v))
        segment = None if layout.segment is None else self.cut.whole_of_folded(layout.segment)
        position = None if self.score_bias is None else self.cut.whole_of_folded(layout.position)
        sums = None
        if decay is not None:
            decay = self.cut.whole_of_folded(decay)
            until = decay.cumsum(1)
            sums = torch.stack([until - decay, until], 2)
        reads = []
        with torch.autograd.graph.saved_tensors_hooks(*_gathered_again(self.cut, (k, v), (keys, values))):
            for number, place in enumerate(self.cut.places):
                # rows of one stretch
                rows, key = self.cut.one_of_folded(q, number), self.cut.one_of_folded(layout.position, number)
                reads.append(self._read_stretch(rows, key, place, (keys, values, segment, position, sums), beta))
        means, frees = zip(*reads, strict=True)
        free = None if beta is None else self.cut.of_stretches([*frees])
        return self.cut.of_stretches([*means]), free, None

    def _read_stretch(
        self,
        q: Tensor,
        places: Tensor,
        place: int,
        whole: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
        beta: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mean and free energy of queries q [B, T, H, E] that stand at `places` [B or 1, T], stretch number `place` of
        the sequence with these keys, values, segments, positions and sums of log decays [B, S, 2, H]."""
        length, keys = q.shape[1], whole[0].shape[1]
        # Operators take queries to be the last of the tokens. Queries of an encoder see later ones too, and where a
        # window counts tokens, or decays add up between them, empty queries stand in for those.
        counts = self.window is not None or whole[4] is not None
        missing = keys - (place + 1) * length if not self.causal and counts else 0
        seen = (place + 1) * length if self.causal else keys
        k, v, segment, position, sums = (None if x is None else x[:, :seen] for x in whole)
        assert k is not None and v is not None
        segments = None
        if segment is not None:
            segments = (segment[:, place * length : place * length + length + missing], segment)
        bias = None
        if position is not None:
            bias = self._bias(F.pad(places, (0, missing)), position, q.dtype)
        q = F.pad(q, (0, 0, 0, 0, 0, missing))
        decays = None if sums is None else sums.permute(0, 3, 2, 1).flatten(2)
        visible: dict[str, Any] = {"window": self.window, "bias": bias, "decays": decays, "segments": segments}
        mean, free = softmax_read(q, k, v, beta, causal=self.causal, **visible)
        return mean[:, :length], None if free is None else free[:, :length]


def _gathered_again(
    cut: Cut, own: tuple[Tensor, ...], wholes: tuple[Tensor, ...]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that keep, instead of a view of one of `wholes`, only which it is: it is gathered from `own` again."""
    held = [x.untyped_storage().data_ptr() for x in wholes]
    own = tuple(x.detach() for x in own)

    def pack(x: Tensor) -> Any:
        storage = x.untyped_storage().data_ptr()
        if storage not in held:
            return x
        return held.index(storage), x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, *view = kept
        with torch.no_grad():
            return cut.whole_of_folded(own[number]).as_strided(*view)

    return pack, unpack
