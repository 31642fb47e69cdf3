"""The softmax free-energy read for values of any range: blocks with their own shift, in float64.

The one-pass read shifts a channel by its largest value in the sequence. A row that cannot see that value (it lies in
the future, or outside the window) may then find only underflowed exponentials. Here every block of keys has a shift of
its own, and keys that only some rows of a block of rows can see are summed in log space one by one, so no invisible
value decides a visible result. One sequence at a time: the caller takes padding and other segments out first.

Shapes: N sequences (pairs of batch and head) that see alike, n queries which are the last of m tokens,
E key width, D value width.  q [N, n, E], k [N, m, E], v [N, m, D], beta [N, D], bias [N, n, m], decays [N, m] or None.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.softmax.decays import Sums, add_, between
from femixer.kernels.softmax.decays import gradients as decay_gradients
from femixer.kernels.softmax.visibility import Visibility

ROWS = 64
KEYS = 512
# Sums below this may have lost terms to underflow; shares below exp(-NEGLIGIBLE) do not count.
LEAST, NEGLIGIBLE = 1e-290, 40.0


class Sequences(NamedTuple):
    """N sequences that see alike, in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    bias: Tensor | Sums | None
    causal: bool
    window: int | None
    scale: float


class Rows(NamedTuple):
    """Rows [start, stop) see keys of [low, high); all of them see [common_low, common_high)."""

    start: int
    stop: int
    low: int
    high: int
    common_low: int
    common_high: int


def row_blocks(n: int, m: int, causal: bool, window: int | None) -> Iterator[Rows]:
    for start in range(0, n, ROWS):
        stop = min(start + ROWS, n)
        first, last = start + m - n, stop - 1 + m - n
        low = common_low = 0
        high = common_high = m
        if causal:
            high, common_high = last + 1, first + 1
        if window is not None:
            low, common_low = max(0, first - window + 1), max(0, last - window + 1)
            high, common_high = min(high, last + window), min(common_high, first + window)
        common_low = min(common_low, high)
        yield Rows(start, stop, low, high, common_low, max(common_low, common_high))


class BlockPrior(NamedTuple):
    """The prior of a block of rows over keys [low, high), [N, rows, keys]: log p, and p itself."""

    log: Tensor
    p: Tensor


def block_prior(s: Sequences, rows: Rows) -> BlockPrior:
    scores = s.q[:, rows.start : rows.stop] @ s.k[:, rows.low : rows.high].mT * s.scale
    offset = s.k.shape[1] - s.q.shape[1]
    if isinstance(s.bias, Sums):
        tokens = slice(rows.start + offset, rows.stop + offset)
        sums = s.bias.split(scores.dtype)
        scores += between(sums.at(tokens), sums.at(slice(rows.low, rows.high)), _ahead(s, rows))
    elif s.bias is not None:
        scores += s.bias[:, rows.start : rows.stop, rows.low : rows.high]
    row = torch.arange(rows.start, rows.stop, device=s.q.device)[:, None] + offset
    for low, high in _fringes(rows):
        key = torch.arange(low, high, device=s.q.device)
        hidden = (key > row) if s.causal else torch.zeros_like(key > row)
        if s.window is not None:
            hidden |= (row - key).abs() >= s.window
        scores[..., low - rows.low : high - rows.low].masked_fill_(hidden, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)
    p = scores.exp()
    total = p.sum(-1, keepdim=True)
    return BlockPrior(scores.sub_(total.log()), p.div_(total))


def _ahead(s: Sequences, rows: Rows) -> Tensor | None:
    """Which keys [low, high) come after a row, bool [rows, keys], where those are seen."""
    if s.causal:
        return None
    index = torch.arange(s.k.shape[1], device=s.k.device)
    offset = s.k.shape[1] - s.q.shape[1]
    return index[rows.low : rows.high] > index[rows.start + offset : rows.stop + offset, None]


class KeyBlock(NamedTuple):
    """Keys [start, stop) seen by every row of the block, with exp(beta (v - top)) ready for a matrix product."""

    start: int
    stop: int
    top: Tensor
    exp: Tensor


class Exponentials:
    """exp(beta (v - top)) per block of keys, made once and used by every block of rows."""

    def __init__(self, s: Sequences) -> None:
        assert s.beta is not None
        self.v, self.beta = s.v, s.beta[:, None]
        self.whole: dict[int, KeyBlock] = {}

    def _block(self, start: int, stop: int) -> KeyBlock:
        v = self.v[:, start:stop]
        top = v.amax(1, keepdim=True)
        return KeyBlock(start, stop, top, (self.beta * (v - top)).exp_())

    def blocks(self, low: int, high: int) -> Iterator[KeyBlock]:
        while low < high:
            stop = min(high, low - low % KEYS + KEYS)
            if stop - low < KEYS:
                yield self._block(low, stop)
            else:
                if low not in self.whole:
                    self.whole[low] = self._block(low, stop)
                yield self.whole[low]
            low = stop


def _fringes(rows: Rows) -> list[tuple[int, int]]:
    return [(a, b) for a, b in ((rows.low, rows.common_low), (rows.common_high, rows.high)) if a < b]


class Found(NamedTuple):
    """The free energy of a block of rows, and how its keys are summed: by products, or one by one in log space
    over ranges of keys."""

    energy: Tensor
    products: list[KeyBlock]
    apart: list[tuple[int, int]]


def _free_energy(s: Sequences, rows: Rows, prior: BlockPrior, exponentials: Exponentials) -> Found:
    beta, apart = exponentials.beta, _fringes(rows)
    products, sums, terms = [], [], []
    for block in exponentials.blocks(rows.common_low, rows.common_high):
        products.append(block)
        sums.append(prior.p[..., block.start - rows.low : block.stop - rows.low] @ block.exp)
        terms.append(sums[-1].log() + beta * block.top)
    fringes = [_in_log_space(s, rows, prior, beta, *part) for part in apart]
    total = torch.stack(terms + fringes).logsumexp(0)
    kept = []
    for number, (block, product) in enumerate(zip(products, sums, strict=True)):
        at = slice(block.start - rows.low, block.stop - rows.low)
        most = prior.log[..., at].logsumexp(-1, keepdim=True) + beta * block.top
        # What underflowed counts if even its bound does.
        if not bool(((product < LEAST) & (most > total - NEGLIGIBLE)).any()):
            kept.append(block)
            continue
        parts = [(low, min(low + ROWS, block.stop)) for low in range(block.start, block.stop, ROWS)]
        terms[number] = torch.stack([_in_log_space(s, rows, prior, beta, *part) for part in parts]).logsumexp(0)
        apart = apart + parts
    if len(kept) < len(products):
        total = torch.stack(terms + fringes).logsumexp(0)
    return Found(total / beta, kept, apart)


def _in_log_space(s: Sequences, rows: Rows, prior: BlockPrior, beta: Tensor, low: int, high: int) -> Tensor:
    """log(sum_i p(i) exp(beta v_i)) over the keys [low, high)."""
    part = prior.log[..., low - rows.low : high - rows.low, None]
    return (part + (beta * s.v[:, low:high])[:, None]).logsumexp(-2)


def free_energy(s: Sequences) -> Tensor:
    """F [N, n, D] = log(sum_i p(i) exp(beta v_i)) / beta."""
    exponentials = Exponentials(s)
    blocks = row_blocks(s.q.shape[1], s.k.shape[1], s.causal, s.window)
    return torch.cat([_free_energy(s, rows, block_prior(s, rows), exponentials).energy for rows in blocks], 1)


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    bias: Any


def gradients(s: Sequences, grad_mean: Tensor, grad_free: Tensor | None, grad_log_z: Tensor | None = None) -> Gradients:
    """Gradients of the mean and of the free energy [N, n, D] with the posterior r = p exp(beta (v - F)):

    dF/dv = r,  dF/dscores = (r - p) / beta,  dF/dbeta = (E_r[v] - F) / beta;  of log-normalizers [N, n, 1] p.
    """
    dq, dk, dv = torch.zeros_like(s.q), torch.zeros_like(s.k), torch.zeros_like(s.v)
    dbeta = None if s.beta is None else torch.zeros_like(s.beta)
    dbias: Tensor | Sums | None = None
    if s.bias is not None:
        dbias = Sums(*map(torch.zeros_like, s.bias)) if isinstance(s.bias, Sums) else torch.zeros_like(s.bias)
    exponentials = None if s.beta is None else Exponentials(s)
    for rows in row_blocks(s.q.shape[1], s.k.shape[1], s.causal, s.window):
        here = slice(rows.start, rows.stop)
        keys = slice(rows.low, rows.high)
        prior = block_prior(s, rows)
        p, v = prior.p, s.v[:, keys]
        mean = p @ v
        to_mean = grad_mean[:, here]
        if exponentials is not None:
            assert dbeta is not None
            assert grad_free is not None
            beta = exponentials.beta
            energy, products, apart = _free_energy(s, rows, prior, exponentials)
            # Where F is the mean (constant values) the posterior is the prior.
            is_mean = energy <= mean
            energy = torch.maximum(energy, mean)
            to_mean = to_mean + grad_free[:, here].masked_fill(~is_mean, 0)
            to_free = grad_free[:, here].masked_fill(is_mean, 0)
            dscores = -p * (to_free / beta).sum(-1, keepdim=True)
            expected = torch.zeros_like(energy)
            for block in products:
                at = slice(block.start - rows.low, block.stop - rows.low)
                weight = p[..., at]
                # The bound acts where the block's share is negligible; it keeps the gradient finite there.
                factor = (beta * (block.top - energy)).clamp_(max=700).exp_().masked_fill_(is_mean, 0)
                dv[:, block.start : block.stop] += block.exp * (weight.mT @ (to_free * factor))
                dscores[..., at] += weight * ((to_free * factor / beta) @ block.exp.mT)
                expected += factor * (weight @ (block.exp * s.v[:, block.start : block.stop]))
            for low, high in apart:
                at = slice(low - rows.low, high - rows.low)
                seen = s.v[:, None, low:high]
                posterior = (prior.log[..., at, None] + beta[:, None] * (seen - energy[:, :, None])).exp_()
                posterior = posterior.masked_fill_(is_mean[:, :, None], 0)
                dv[:, low:high] += torch.einsum("ntsd,ntd->nsd", posterior, to_free)
                dscores[..., at] += torch.einsum("ntsd,ntd->nts", posterior, to_free / beta)
                expected += (posterior * seen).sum(-2)
            dbeta += (to_free * (expected - energy) / beta).sum(1)
        else:
            dscores = torch.zeros_like(p)
        dv[:, keys] += p.mT @ to_mean
        dscores += p * (to_mean @ v.mT - (to_mean * mean).sum(-1, keepdim=True))
        if grad_log_z is not None:
            dscores += p * grad_log_z[:, here]
        dq[:, here] = dscores @ s.k[:, keys] * s.scale
        dk[:, keys] += dscores.mT @ s.q[:, here] * s.scale
        if isinstance(dbias, Sums):
            offset = s.k.shape[1] - s.q.shape[1]
            parts = decay_gradients(dscores, _ahead(s, rows))
            for part, at in zip(parts, (slice(rows.start + offset, rows.stop + offset), keys), strict=True):
                dbias.before[:, at] += part.before
                dbias.until[:, at] += part.until
        elif dbias is not None:
            dbias[:, here, keys] = dscores
    return Gradients(dq, dk, dv, dbeta, dbias)


class Selection(NamedTuple):
    """Sequences and where they come from: pairs (batch, head), token indices of queries and keys."""

    sequences: Sequences
    batch: Tensor
    head: Tensor
    group: Tensor
    rows: Tensor
    keys: Tensor

    def put(self, target: Tensor, result: Tensor) -> None:
        """target[batch, rows, head] = result [N, n, D]"""
        target[self.batch[:, None], self.rows, self.head[:, None]] = result.to(target.dtype)

    def take(self, source: Tensor) -> Tensor:
        return source[self.batch[:, None], self.rows, self.head[:, None]].double()

    def put_bias(self, target: Tensor, result: Tensor | Sums) -> None:
        """target[batch, head, rows, keys] = result [N, n, m]; gradients of sums are added."""
        if isinstance(result, Sums):
            for batch, head, before, until in zip(self.batch, self.head, *result, strict=True):
                add_(target[batch, head], Sums(before, until), self.keys)
            return
        where = self.batch[:, None, None], self.head[:, None, None], self.rows[:, None], self.keys
        target[where] = result.to(target.dtype)

    def add_keys(self, target: Tensor, result: Tensor) -> None:
        index = (
            self.batch[:, None].expand(-1, len(self.keys)),
            self.keys.expand(len(self.batch), -1),
            self.group[:, None].expand(-1, len(self.keys)),
        )
        target.index_put_(index, result.to(target.dtype), accumulate=True)


def selections(
    again: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, seen: Visibility, scale: float
) -> Iterator[Selection]:
    """The sequences of the heads `again` [B, H] of a read."""
    repeats = q.shape[2] // k.shape[2]
    t, s = q.shape[1], k.shape[1]
    everywhere = torch.arange(s, device=q.device)

    def selection(batch: Tensor, head: Tensor, rows: Tensor, keys: Tensor) -> Selection:
        group = head // repeats
        at = batch[:, None]
        bias: Tensor | Sums | None = None
        if seen.bias is not None:
            bias = seen.bias[batch, head].double()
            bias = Sums.of(bias).at(keys) if seen.decays else bias[:, rows][:, :, keys]
        sequences = Sequences(
            q[at, rows, head[:, None]].double(),
            k[at, keys, group[:, None]].double(),
            v[at, keys, group[:, None]].double(),
            None if beta is None else beta[group].double(),
            bias,
            seen.causal,
            seen.window,
            scale,
        )
        return Selection(sequences, batch, head, group, rows, keys)

    if seen.segments_q is None or seen.segments_k is None:
        for pairs in again.nonzero().split(8):
            yield selection(pairs[:, 0], pairs[:, 1], everywhere[s - t :] - (s - t), everywhere)
        return
    for b in again.any(1).nonzero()[:, 0].tolist():
        head = again[b].nonzero()[:, 0]
        for segment in seen.segments_q[b].unique().tolist():
            if segment >= 0:
                rows = (seen.segments_q[b] == segment).nonzero()[:, 0]
                keys = (seen.segments_k[b] == segment).nonzero()[:, 0]
                yield selection(torch.full_like(head, b), head, rows, keys)


Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None]


def read_again(free: Tensor, again: Tensor, arguments: Arguments, seen: Visibility, scale: float) -> None:
    """Put the free energies of the heads `again` [B, H] in their places. arguments: q, k, v, beta."""
    for each in selections(again, *arguments, seen, scale):
        each.put(free, free_energy(each.sequences))


def add_gradients(
    found: Gradients,
    again: Tensor,
    arguments: Arguments,
    seen: Visibility,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Put their gradients in their places, or add them. grads: of mean and free energy [B, T, H, D], and of
    log-normalizers [B, H, T]."""
    to_mean, to_free, to_log_z = grads
    for each in selections(again, *arguments, seen, scale):
        free_grad = None if each.sequences.beta is None else each.take(to_free)
        log_z_grad = None if to_log_z is None else each.take(to_log_z.transpose(1, 2)[..., None])
        result = gradients(each.sequences, each.take(to_mean), free_grad, log_z_grad)
        each.put(found.q, result.q)
        each.add_keys(found.k, result.k)
        each.add_keys(found.v, result.v)
        if found.beta is not None and result.beta is not None:
            found.beta.index_add_(0, each.group, result.beta.to(found.beta.dtype))
        if found.bias is not None and result.bias is not None:
            each.put_bias(found.bias, result.bias)
