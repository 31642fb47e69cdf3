"""The scan per channel in torch's operations: cumulative sums of exponentials in log space and float64.

Two of them are the logarithms of the totals of weights and of weights times exp(beta v); two more, of the positive and
of the negative values, make the mean. Sums of gates are taken out before and put back after. Time is the last dimension
here, along which torch sums in parallel on a GPU and in order of memory on a CPU.

Backwards, with w and c the shares that a token and its past have in the total, r and o those with exp(beta v):

    A_t[g] = g_t + c_{t+1} A_{t+1}[g],   R_t[g] = g_t + o_{t+1} R_{t+1}[g],   h = d free / beta
    m = A[d mean],   n = A[mean d mean + h - d log_total],   f = R[h]
    d key = r f - w (n - v m),   d v = beta r f + w m,   d gate_t = sum over s < t of d key_s - d log_total_s

As c_{t+1} = exp(total_t - total_{t+1}), A and R are cumulative sums of exponentials too, in reversed time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.reading import NOTHING, state_dtype

# The logarithm of a number without one is that of this, which keeps gradients finite.
LEAST = 1e-300
# At a segment's first token the past is made smaller than the token by this many nats: exp(-WIPED) is zero in float64.
WIPED = 800.0

Arguments = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Weights(NamedTuple):
    """In float64, with the state as one more token before the others (S tokens in all) if there is one or there may be
    no other token: value [B, C, S], and logs [B, C, S] of the weights and, with a temperature, of the weights times
    exp(beta v). The logs are without the sums of the gates, `reach` [B, C, S], if there are any. beta [C, 1]."""

    value: Tensor
    log: Tensor
    warm: Tensor | None
    reach: Tensor | None
    beta: Tensor | None


def _weights(arguments: Arguments) -> Weights:
    key, gate, v, beta, marks, state = arguments
    value = _time_last(v)
    log = torch.zeros_like(value) if key is None else _time_last(key)
    gate = None if gate is None else _time_last(gate)
    beta = None if beta is None else beta.double()[:, None]
    if marks is not None:
        padding = is_padding(marks)[:, None]
        # An empty total is a finite number here, because infinities have no difference; padding is less than that.
        value, log = value.masked_fill(padding, 0), log.masked_fill(padding, 2 * NOTHING)
        gate = None if gate is None else gate.masked_fill(padding, 0)
    energy = value
    if state is not None:
        log, energy, value = _after(state[0].clamp_min(NOTHING), log), _after(state[2], value), _after(state[1], value)
    elif marks is not None:
        log, energy = F.pad(log, (1, 0), value=NOTHING), F.pad(value, (1, 0))
        value = energy
    if gate is not None and not (marks is state is None):
        gate = F.pad(gate, (1, 0))
    reach = None if gate is None else gate.cumsum(-1)
    if marks is not None:
        logs = log[None] if beta is None else torch.stack([log, torch.addcmul(log, energy, beta)])
        reach = _wiped(logs, reach, is_start(marks))
    log = log if reach is None else log - reach
    return Weights(value, log, None if beta is None else torch.addcmul(log, energy, beta), reach, beta)


def _time_last(x: Tensor) -> Tensor:
    """[B, T, C] -> [B, C, T], side by side in memory along time, where it is summed."""
    return x.mT.to(torch.float64, memory_format=torch.contiguous_format)


def _after(first: Tensor, x: Tensor) -> Tensor:
    """x [B, C, T] with one more token before it."""
    return torch.cat([first[..., None], x], -1)


def _wiped(log: Tensor, reach: Tensor | None, start: Tensor) -> Tensor:
    """The sums of the gates [B, C, S], with those of segments' first tokens such that nothing is left of the past, but
    no larger than that needs: a sum of large numbers has few digits for small ones."""
    first = F.pad(start, (log.shape[-1] - start.shape[-1], 0))[:, None]
    reach = torch.zeros_like(log[0]) if reach is None else reach
    forgotten = torch.add(reach, first.double().cumsum(-1), alpha=NOTHING)
    # Only a bound, in which digits that get lost do not matter: the total of the segment up to the token before.
    past = (_log_sums(log - forgotten) + forgotten).roll(1, -1)
    excess = (past - log).amax(0).clamp_min(0) + WIPED
    return reach - excess.masked_fill(~first, 0).cumsum(-1)


def _log_sums(x: Tensor) -> Tensor:
    """x.logcumsumexp(-1). Its forward derivative in torch is relative to the largest of all: nothing before a rise."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return x.logcumsumexp(-1)
    for distance in (2**n for n in range(x.shape[-1].bit_length())):
        late, early = x[..., distance:], x[..., :-distance]
        more, less = torch.where(late > early, late, early), torch.where(late > early, early, late)
        x = torch.cat([x[..., :distance], more + F.softplus(less - more)], -1)
    return x


def _mean(value: Tensor, log: Tensor, total: Tensor) -> Tensor:
    """sum over i <= t of exp(log_i - total_t) value_i, [B, C, S] as all are."""
    signed = torch.stack([value, -value]).clamp_min(LEAST).log() + log
    positive, negative = (_log_sums(signed) - total).exp().unbind()
    return positive - negative


def _tokens(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """[B, C, S] -> [B, T, C], without the state."""
    return x[..., x.shape[-1] - length :].mT.to(dtype, memory_format=torch.contiguous_format)


def forward(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    value, log, warm, reach, b = _weights((key, gate, v, beta, marks, state))
    log_sum = _log_sums(log)
    mean = _mean(value, log, log_sum)
    rows = [log_sum if reach is None else log_sum + reach, mean]
    if warm is not None and b is not None:
        rows.append(torch.maximum((_log_sums(warm) - log_sum) / b, mean))
    dtype = torch.promote_types(v.dtype, torch.float32)
    shown = [_tokens(x, v.shape[1], dtype) for x in rows]
    if marks is not None:
        padding = is_padding(marks)[..., None]
        shown = [x.masked_fill(padding, 0) for x in shown]
    free = shown[1].new_empty(0) if beta is None else shown[2]
    return shown[1], free, shown[0], _last(rows).to(state_dtype(v.device)), v.new_empty(0)


def _last(rows: list[Tensor]) -> Tensor:
    """The next state. That of no token is that of infinitely little weight."""
    if not rows[0].shape[-1]:
        return torch.stack([rows[0].new_full(rows[0].shape[:2], x) for x in (-torch.inf, 0, 0)])
    ends = [x[..., -1] for x in rows]
    ends[0] = ends[0].masked_fill(ends[0] < NOTHING / 2, -torch.inf)
    return torch.stack(ends if len(ends) == 3 else [*ends, torch.zeros_like(ends[1])])


READS_RESULTS = False


def backward(
    grads: tuple[Tensor | None, ...], arguments: Arguments, results: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    key, gate, v, beta, _, state = arguments
    weights = _weights(arguments)
    value, log, warm, b = weights.value, weights.log, weights.warm, weights.beta
    del weights
    total = log.logcumsumexp(-1)
    # What is used is gone at once: this is the peak of a training step.
    flows, h, to_log = _flows(grads, arguments, _mean(value, log, total), b)
    r = d_beta = None
    if beta is not None and b is not None and warm is not None and h is not None:
        warm_total = warm.logcumsumexp(-1)
        (r,) = _backwards([h], warm_total)
        r = warm.sub_(warm_total).exp_().mul_(r)
        d_beta = (r * value).addcmul_(h, warm_total.sub_(total).div_(b), value=-1).sum((0, 2))
        if state is not None:  # whose energy is not its mean
            d_beta = d_beta + (r[..., 0] * (state[2] - state[1])).sum(0)
        d_beta = d_beta.to(beta.dtype)
        del warm_total
    del warm, h
    m, n = _backwards(flows, total)
    share = (log - total).exp_()
    n = n.addcmul_(value, m, value=-1).mul_(share)
    d_log = -n if r is None else r - n
    d_value = m.mul_(share)
    del log, share, total, value, n
    d_state = None
    if state is not None:
        end = torch.zeros_like(d_log[..., 0]) if r is None or b is None else r[..., 0] * b[:, 0]
        d_state = torch.stack([d_log[..., 0], d_value[..., 0], end])
    d_v = d_value if r is None or b is None else torch.addcmul(d_value, r, b)
    d_v, d_key = (None if x is None else _tokens(g, v.shape[1], x.dtype) for x, g in ((v, d_v), (key, d_log)))
    return d_key, None if gate is None else _to_gate(d_log, to_log, arguments), d_v, d_beta, None, d_state


def _to_gate(d_log: Tensor, to_log: Tensor | None, arguments: Arguments) -> Tensor:
    """What flows across a gate, from later rows to earlier tokens: the sum of d log - d log_total before it."""
    _, gate, v, _, marks, _ = arguments
    assert gate is not None
    flow = d_log if to_log is None else d_log - to_log
    found = flow.cumsum(-1).sub_(flow)
    if marks is None:
        return _tokens(found, v.shape[1], gate.dtype)
    # Nothing flows across a segment's start, not even what is left of sums that cancel.
    start = F.pad(is_start(marks), (found.shape[-1] - v.shape[1], 0))
    first = torch.arange(found.shape[-1], device=v.device).masked_fill(~start, 0).cummax(-1).values
    found = found - found.gather(-1, first[:, None].expand_as(found))
    return _tokens(found, v.shape[1], gate.dtype).masked_fill(is_padding(marks)[..., None], 0)


def _flows(
    grads: tuple[Tensor | None, ...], arguments: Arguments, mean: Tensor, beta: Tensor | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """d mean and mean d mean + h - d log_total, h = d free / beta, and d log_total [B, C, S]."""
    marks = arguments[4]
    of_mean, of_free, of_log, of_last = grads[:4]

    def along_time(grad: Tensor | None, number: int) -> Tensor | None:
        """The gradient of a result, and at the last token that of the same number of the state."""
        if grad is not None:
            grad = _time_last(grad)
            if marks is not None:
                grad = grad.masked_fill(is_padding(marks)[:, None], 0)
            grad = grad if grad.shape[-1] == mean.shape[-1] else F.pad(grad, (1, 0))
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
    return [to_mean, cost if to_log is None else cost - to_log], h, to_log


def _backwards(flows: list[Tensor], total: Tensor) -> Tensor:
    """sum over t >= s of exp(total_s - total_t) flow_t, for flows and total [B, C, S]; the list is emptied."""
    count = len(flows)
    # One name for all, so that no more than two of them are held at a time.
    x = torch.stack(flows * 2)
    flows.clear()
    x[count:].neg_()
    x = x.clamp_min_(LEAST).log_().sub_(total).flip(-1)
    x = x.logcumsumexp(-1)
    x = x.flip(-1).add_(total).exp_()
    return x[:count] - x[count:]
