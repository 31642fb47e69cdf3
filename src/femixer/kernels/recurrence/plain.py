"""The linear recurrence in torch's operations, whose number grows with the logarithm of the length.

Four tokens are taken as one, and four of these again; in place that takes little memory. In float32, off a CPU, a chunk
of 64 is multiplied by the decays of all its pairs instead, unless these are too many: that is fewer operations.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.reading import is_followed, wide

CHUNK, PAIRED_CHUNK = 16, 64
# Of chunks, in exported programs.
LEVELS = 2
# A log decay below this is taken for it: a free energy sees no further than 60 nats.
LEAST = -80.0
# More numbers than this are not made of pairs.
NUMBERS = 2**23
# Log decays summed within chunks, and the decays of all pairs in them.
Pairwise = list[Tensor]


def scan(
    log_decay: Tensor,
    x: Tensor,
    initial: Tensor | None = None,
    *,
    resets: bool = False,
    spare: bool = False,
    backwards: bool = False,
    pairs: Pairwise | None = None,
) -> Tensor:
    """h_t = exp(log_decay_t) h_{t-1} + x_t in `wide`: log_decay <= 0 and x [B, T, ...], initial [B, ...] or zero.

    log_decay broadcasts to x in the dimensions after T. resets: it may be -inf, and then exactly nothing is left of the
    past; that takes more operations. spare: neither log_decay nor x is needed any more. backwards, from no state:
    h_t = x_t + exp(log_decay_{t+1}) h_{t+1}. pairs: an empty list, or that of a call before with this log_decay.
    """
    log_decay, x = wide(log_decay), wide(x)
    if initial is not None:
        first = torch.addcmul(x[:, :1], log_decay[:, :1].exp(), initial.to(x.dtype)[:, None])
        x = torch.cat([first, x[:, 1:]], 1)
    if isinstance(x.shape[1], torch.SymInt) and not resets:
        log_decay = log_decay.clamp_min(LEAST)
        if backwards:  # the last decay, which comes first then, is used by none
            return _in_levels(log_decay.flip(1).roll(1, 1), x.flip(1), LEVELS).flip(1)
        return _in_levels(log_decay, x, LEVELS)
    if resets or x.dtype == torch.float64 or PAIRED_CHUNK * log_decay.numel() > NUMBERS or x.shape[1] > PAIRED_CHUNK**2:
        decay = log_decay.exp_() if spare and log_decay.shape == x.shape else log_decay.exp()
        return _by_doubling(decay, x, spare, backwards)
    return _by_pairs(log_decay, x, backwards, [] if pairs is None else pairs)


def _by_pairs(gates: Tensor, x: Tensor, backwards: bool, kept: Pairwise) -> Tensor:
    """In chunks: what their own tokens add, by the decays D of all pairs, and what comes from their neighbours."""
    length, shape = x.shape[1], x.shape
    if gates.dim() == 4 and gates.shape[2] == 1:  # shared by all of a dimension
        gates, x = gates[:, :, 0], x.permute(0, 3, 1, 2)
    else:
        gates, x = gates.expand_as(x).flatten(2), x.flatten(2).mT[..., None]
    gates = gates.mT  # [B, W, T], and x [B, W, T, E]
    chunk = max(1, min(length, PAIRED_CHUNK))
    if length % chunk:
        gates, x = F.pad(gates, (0, -length % chunk)), F.pad(x, (0, 0, 0, -length % chunk))
    if not kept:
        reach = gates.clamp_min(LEAST).unflatten(-1, (-1, chunk)).cumsum(-1)
        kept += [reach, _decays(reach, reach, 0)]
    reach, pairs = kept
    h = (pairs.mT if backwards else pairs) @ x.unflatten(2, (-1, chunk))
    if reach.shape[2] > 1:
        edge, end = (pairs[..., -1, :], h[..., 0, :]) if backwards else (pairs[..., 0], h[..., -1, :])
        # What has come to the first token of a chunk, or backwards to its last one.
        until = reach[..., -1].clamp_min(LEAST).cumsum(-1)
        chunks = _decays(F.pad(until[..., :-1], (1, 0)) + reach[..., 0], until, -1)
        h = torch.addcmul(h, edge[..., None], ((chunks.mT if backwards else chunks) @ end)[..., None, :])
    h = h.flatten(2, 3)[:, :, :length]
    return h.permute(0, 2, 3, 1) if len(shape) == 4 and h.shape[3] > 1 else h.permute(0, 2, 3, 1).reshape(shape)


def _decays(until: Tensor, since: Tensor, diagonal: int) -> Tensor:
    """exp(until_t - since_i) where t - i >= -diagonal, else zero."""
    pairs = until[..., :, None] - since[..., None, :]
    if is_followed():
        return pairs.clamp_max(0).exp().tril(diagonal)  # an infinity would make NaN of its gradient, which is zero
    return pairs.exp_().tril_(diagonal)


def _by_doubling(decay: Tensor, x: Tensor, spare: bool, backwards: bool) -> Tensor:
    """Sums of 2, 4, 8 ... tokens up to each. Only products of decays are formed, so a decay of zero stays that. They
    are not needed any more, nor is x if it is `spare`."""
    if backwards:
        return _by_doubling(decay.expand_as(x).flip(1).roll(1, 1), x.flip(1), True, False).flip(1)
    if not is_followed():
        x = x if spare else x.clone(memory_format=torch.contiguous_format)
        _in_place(decay.expand_as(x).contiguous(), x)
        return x
    distance = 1
    while distance < x.shape[1]:
        x = torch.cat([x[:, :distance], torch.addcmul(x[:, distance:], decay[:, distance:], x[:, :-distance])], 1)
        decay = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], 1)
        distance *= 2
    return x


def _in_place(decay: Tensor, x: Tensor) -> None:
    """Four tokens as one, which is a recurrence of a quarter of the length, and then the first three of each four after
    their predecessor: without further memory."""
    length = x.shape[1]
    whole = length // 4 * 4
    if whole:
        products, sums = (y[:, :whole].unflatten(1, (-1, 4)) for y in (decay, x))
        for i in (1, 2, 3):
            sums[:, :, i].addcmul_(products[:, :, i], sums[:, :, i - 1])
        if whole > 4:
            products.cumprod_(2)
            _in_place(products[:, :, 3], sums[:, :, 3])
            sums[:, 1:, :3].addcmul_(products[:, 1:, :3], sums[:, :-1, 3:])
    for i in range(max(1, whole), length):
        x[:, i].addcmul_(decay[:, i], x[:, i - 1])


def _in_levels(gates: Tensor, x: Tensor, levels: int) -> Tensor:
    """By the same operations for any length: chunks, chunks of chunks in so many levels, and all pairs of what is left.

    In float64 chunks of 16 are summed relative to their middle: exp of 8 log decays of LEAST has range to spare.
    """
    length = x.shape[1]
    if levels == 0:
        return _pairs(gates[:, None], x[:, None])[1][:, 0]
    exact = x.dtype == torch.float64
    chunk = CHUNK if exact else PAIRED_CHUNK
    gates, x = (F.pad(y, (0, 0) * (y.dim() - 2) + (0, -length % chunk)) for y in (gates, x))
    gates, x = gates.unflatten(1, (-1, chunk)), x.unflatten(1, (-1, chunk))
    reach, h = _around_the_middle(gates, x) if exact else _pairs(gates, x)
    ends = _in_levels(reach[:, :, -1].clamp_min(LEAST), h[:, :, -1], levels - 1)[:, :-1]
    before = F.pad(ends, (0, 0) * (ends.dim() - 2) + (1, 0))
    return torch.addcmul(h, reach.exp(), before[:, :, None]).flatten(1, 2)[:, :length]


def _around_the_middle(gates: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the gates, and the recurrence of every chunk by itself, of gates and x [B, J, L, ...]."""
    reach = gates.cumsum(2)
    half = reach.shape[2] // 2
    middle = reach - reach[:, :, half : half + 1]
    # Not a quotient: its gradient squares the divisor, which then overflows.
    return reach, middle.exp() * (x * (-middle).exp()).cumsum(2)


def _pairs(gates: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same as [B, J, L, L, ...], for any range of gates."""
    reach, length = gates.cumsum(2), gates.shape[2]
    later = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
    later = later.view(length, length, *[1] * (gates.dim() - 3))
    decay = (reach[:, :, :, None] - reach[:, :, None]).masked_fill(later, -torch.inf).exp()
    if gates.dim() == 5 and gates.shape[3] == 1:  # shared by all of a dimension, which a product can do
        return reach, torch.einsum("bjtiw,bjiew->bjtew", decay[..., 0, :], x)
    return reach, (decay * x[:, :, None]).sum(3)


def forward(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    if isinstance(inputs.shape[1], torch.SymInt):
        # Not the logarithm of zero, whose gradient is infinite.
        log_decay = torch.where(decay == 0, -torch.inf, wide(decay).clamp_min(math.exp(LEAST)).log())
        return (scan(log_decay, inputs, initial, resets=resets).to(inputs.dtype),)
    x = wide(inputs)
    first = torch.addcmul(x[:, :1], wide(decay[:, :1]), wide(initial)[:, None])
    x = torch.cat([first, x[:, 1:]], 1)
    own = wide(decay) if is_followed() else wide(decay).clone()
    return (_by_doubling(own, x, True, False).to(inputs.dtype),)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor, Tensor, bool],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """The same recurrence backwards: e_t = grad_t + decay_{t+1} e_{t+1}; d input = e, d decay_t = e_t h_{t-1}."""
    (grad,), (decay, inputs, initial, _), (h,) = grads, arguments, results
    if not h.shape[1]:
        return torch.zeros_like(decay), torch.zeros_like(inputs), torch.zeros_like(initial)
    error = _by_doubling(wide(decay), wide(grad), False, True)
    error = error.to(inputs.dtype)
    before = torch.cat([initial[:, None], h[:, :-1]], 1)
    return error * before, error, error[:, 0] * decay[:, 0]
