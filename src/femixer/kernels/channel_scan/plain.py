"""The scan per channel in torch's operations: cumulative sums of exponentials in log space and float64.

Two of them are the logarithms of the totals of weights and of weights times exp(beta v); two more, of the positive and
of the negative values, make the mean. Sums of gates are taken out before and put back after. Time is the last dimension
here, along which torch sums in parallel on a GPU and in order of memory on a CPU.

Backwards, with w and c the shares that a token and its past have in the total, r and o those with exp(beta v), and a
prime for the token before:

    A_t[g] = g_t + c_{t+1} A_{t+1}[g],   R_t[g] = g_t + o_{t+1} R_{t+1}[g],   h = d free / beta
    m = A[d mean],   n = A[mean d mean + h - d log_total],   f = R[h]
    d key = r f - w (n - v m),   d gate = o f - c (n - mean' m),   d v = beta r f + w m

As c_{t+1} = exp(total_t - total_{t+1}), A and R are cumulative sums of exponentials too, in reversed time.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.reading import NOTHING, state_dtype

# The logarithm of a number without one is that of this, which keeps gradients finite.
LEAST = 1e-300
# At a segment's first token the past is made smaller than the token by this many nats: exp(-WIPED) is zero in float64.
WIPED = 800.0

Arguments = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Weights(NamedTuple):
    """In float64, with the state as one more token before the others: value [B, C, 1 + T] and log [1 or 2, B, C, 1 + T]
    of the weights and, with a temperature, of the weights times exp(beta v). The logs are without the sums of the
    gates, `reach` [B, C, 1 + T], if there are any."""

    value: Tensor
    log: Tensor
    reach: Tensor | None


def _weights(arguments: Arguments) -> Weights:
    key, gate, v, beta, marks, state = arguments
    value = v.mT.double()
    log = torch.zeros_like(value) if key is None else key.mT.double()
    gate = None if gate is None else gate.mT.double()
    if marks is not None:
        padding = is_padding(marks)[:, None]
        # An empty total is a finite number here, because infinities have no difference; padding is less than that.
        value, log = value.masked_fill(padding, 0), log.masked_fill(padding, 2 * NOTHING)
        gate = None if gate is None else gate.masked_fill(padding, 0)
    log = _after(None if state is None else state[0].clamp_min(NOTHING), log, NOTHING)[None]
    energy = None if beta is None or state is None else _after(state[2], value)
    value = _after(None if state is None else state[1], value)
    if beta is not None:
        log = torch.cat([log, torch.addcmul(log, value if energy is None else energy, _column(beta))])
    reach = None if gate is None else _after(None, gate).cumsum(-1)
    if marks is not None:
        reach = _wiped(log, reach, is_start(marks))
    return Weights(value, log if reach is None else log - reach, reach)


def _after(first: Tensor | None, x: Tensor, nothing: float = 0.0) -> Tensor:
    """x [B, C, T] with one more token before it."""
    return F.pad(x, (1, 0), value=nothing) if first is None else torch.cat([first[..., None], x], -1)


def _column(beta: Tensor) -> Tensor:
    return beta.double()[:, None]


def _wiped(log: Tensor, reach: Tensor | None, start: Tensor) -> Tensor:
    """The sums of the gates [B, C, 1 + T], with those of segments' first tokens such that nothing is left of the past,
    but no larger than that needs: a sum of large numbers has few digits for small ones."""
    first = F.pad(start, (1, 0))[:, None]
    reach = torch.zeros_like(log[0]) if reach is None else reach
    forgotten = torch.add(reach, first.double().cumsum(-1), alpha=NOTHING)
    # Only a bound, in which digits that get lost do not matter: the total of the segment up to the token before.
    past = ((log - forgotten).logcumsumexp(-1) + forgotten).roll(1, -1)
    excess = (past - log).amax(0).clamp_min(0) + WIPED
    return reach - excess.masked_fill(~first, 0).cumsum(-1)


def _mean(value: Tensor, log: Tensor, total: Tensor) -> Tensor:
    """sum over i <= t of exp(log_i - total_t) value_i, [B, C, 1 + T] as all are."""
    signed = torch.stack([value, -value]).clamp_min(LEAST).log() + log
    positive, negative = (signed.logcumsumexp(-1) - total).exp().unbind()
    return positive - negative


def _tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, C, 1 + T] -> [B, T, C], without the state."""
    return x[..., 1:].mT.to(dtype, memory_format=torch.contiguous_format)


def forward(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    value, log, reach = _weights((key, gate, v, beta, marks, state))
    log_sum = log.logcumsumexp(-1)
    mean = _mean(value, log[0], log_sum[0])
    log_total = log_sum[0] if reach is None else log_sum[0] + reach
    rows = [log_total, mean]
    if beta is not None:
        rows.append(torch.maximum((log_sum[1] - log_sum[0]) / _column(beta), mean))
    # The state of no token is that of infinitely little weight.
    ends = [x[..., -1] for x in rows]
    ends[0] = ends[0].masked_fill(ends[0] < NOTHING / 2, -torch.inf)
    last = torch.stack(ends if beta is not None else [*ends, torch.zeros_like(ends[1])])
    shown = [_tokens(x, torch.promote_types(v.dtype, torch.float32)) for x in rows]
    if marks is not None:
        padding = is_padding(marks)[..., None]
        shown = [x.masked_fill(padding, 0) for x in shown]
    free = shown[1].new_empty(0) if beta is None else shown[2]
    return shown[1], free, shown[0], last.to(state_dtype(v.device)), v.new_empty(0)


READS_RESULTS = False


def backward(
    grads: tuple[Tensor | None, ...], arguments: Arguments, _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    key, gate, v, beta, marks, state = arguments
    b = None if beta is None else _column(beta)
    value, log = _weights(arguments)[:2]
    log_sum = log.logcumsumexp(-1)
    mean = _mean(value, log[0], log_sum[0])
    share = log.sub_(log_sum).exp_()
    *flows, h = _flows(grads, arguments, mean, b)
    # One after the other, and gone when it is used: at the peak of a training step.
    n, m = (_backwards(flows.pop(), log_sum[0]) for _ in range(2))
    f = None if h is None else _backwards(h, log_sum[1])
    d_gate = None if gate is None else _to_gate(log_sum, mean, (m, n, f), marks, gate.dtype)
    d_value = share[0] * m
    d_log = share[0] * n.addcmul_(value, m, value=-1).neg_()
    d_energy = d_beta = None
    if beta is not None and b is not None and h is not None and f is not None:
        r = f.mul_(share[1])
        del share, mean, m, n
        d_log, d_energy = d_log.add_(r), r * b
        d_beta = r.mul_(value).addcmul_(h, (log_sum[1] - log_sum[0]).div_(b), value=-1).sum((0, 2))
        if state is not None:  # whose energy is not its mean
            d_beta = d_beta + (d_energy[..., 0] / b[:, 0] * (state[2] - state[1])).sum(0)
        d_beta = d_beta.to(beta.dtype)
    d_v = d_value if d_energy is None else d_value + d_energy
    d_state = None
    if state is not None:
        end = torch.zeros_like(d_log[..., 0]) if d_energy is None else d_energy[..., 0]
        d_state = torch.stack([d_log[..., 0], d_value[..., 0], end])
    return None if key is None else _tokens(d_log, key.dtype), d_gate, _tokens(d_v, v.dtype), d_beta, None, d_state


def _to_gate(
    log_sum: Tensor,
    mean: Tensor,
    flows: tuple[Tensor, Tensor, Tensor | None],
    marks: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """o f - c (n - mean' m), [B, T, C]."""
    m, n, f = flows
    past = ((x[..., :-1] - x[..., 1:]).exp_() for x in log_sum)  # c, then o
    found = torch.addcmul(n[..., 1:], mean[..., :-1], m[..., 1:], value=-1).mul_(next(past)).neg_()
    if f is not None:
        found = found.addcmul_(next(past), f[..., 1:])
    found = found.mT.to(dtype, memory_format=torch.contiguous_format)
    return found if marks is None else found.masked_fill(is_padding(marks)[..., None], 0)


def _flows(
    grads: tuple[Tensor | None, ...], arguments: Arguments, mean: Tensor, beta: Tensor | None
) -> tuple[Any, ...]:
    """d mean, mean d mean + h - d log_total, and h = d free / beta [B, C, 1 + T]."""
    marks = arguments[4]
    of_mean, of_free, of_log, of_last = grads[:4]

    def along_time(grad: Tensor | None, number: int) -> Tensor | None:
        """The gradient of a result, and at the last token that of the same number of the state."""
        if grad is not None:
            grad = _after(None, grad.mT.double())
            if marks is not None:
                grad = grad.masked_fill(F.pad(is_padding(marks), (1, 0))[:, None], 0)
        if of_last is None:
            return grad
        end = F.pad(of_last[number, ..., None], (mean.shape[-1] - 1, 0))
        return end if grad is None else grad + end

    to_log, to_mean = along_time(of_log, 0), along_time(of_mean, 1)
    to_free = None if beta is None else along_time(of_free, 2)
    to_mean = torch.zeros_like(mean) if to_mean is None else to_mean
    if beta is None or to_free is None:
        h, cost = None, mean * to_mean
    else:
        h = to_free / beta
        cost = torch.addcmul(h, mean, to_mean)
    return to_mean, cost if to_log is None else cost - to_log, h


def _backwards(flow: Tensor, total: Tensor) -> Tensor:
    """sum over t >= s of exp(total_s - total_t) flow_t, for flow and total [B, C, 1 + T]."""
    # One name for all, so that no more than two of them are held at a time.
    x = torch.stack([flow, -flow])
    del flow
    x = x.clamp_min_(LEAST).log_().sub_(total).flip(-1)
    x = x.logcumsumexp(-1)
    x = x.flip(-1).add_(total).exp_()
    return x[0] - x[1]
