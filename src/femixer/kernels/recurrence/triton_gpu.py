"""The linear recurrence by chunks of tokens: their products and sums, the state before each, and the chunks again.

Backwards it is the same with time reversed: E_t = decay_t e_t is what a token hands to the one before, with
e_t = grad_t + E_{t+1}; then d inputs = e and d decay_t = e_t h_{t-1}.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_tokens import Chunks, lanes_of, rows, tile_of, unserved


def refuse(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> str | None:
    return unserved(decay, inputs, initial) if inputs.shape[1] else "there is no token"


def forward(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    (decay, decay_step), (inputs, input_step), initial = rows(decay), rows(inputs), initial.contiguous()
    h = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    chunks = Chunks(*inputs.shape)
    ends = chunks.summaries(2, h.device)
    if chunks.count > 1:
        chunks.walk(_sums, decay, inputs, ends, decay_step, input_step, BACK=False)
        chunks.carry(_over_chunks, ends, initial, BACK=False)
    chunks.walk(_forward, decay, inputs, initial, ends, h, decay_step, input_step)
    return (h,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor, Tensor, bool],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    (decay, decay_step), (grad, grad_step) = rows(arguments[0]), rows(grads[0])
    initial, (h,) = arguments[2].contiguous(), results
    chunks = Chunks(*h.shape)
    ends = chunks.summaries(2, h.device)
    if chunks.count > 1:
        chunks.walk(_sums, decay, grad, ends, decay_step, grad_step, BACK=True)
        chunks.carry(_over_chunks, ends, initial, BACK=True)
    to_decay, to_inputs = (torch.empty(h.shape, dtype=x.dtype, device=h.device) for x in (decay, h))
    to_initial = torch.empty_like(initial)
    operands = decay, grad, h, initial, ends, to_decay, to_inputs, to_initial
    chunks.walk(_backward, *operands, decay_step, grad_step)
    return to_decay, to_inputs, to_initial


@triton.jit(do_not_specialize=["length", "tokens", "count", "all_chunks"])
def _sums(
    DECAY, INPUTS, ENDS, decay_step, input_step, length, tokens, count, all_chunks, channels,
    BACK: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A chunk's product of decays and its sum as if nothing came before; BACK: after it, in reversed time."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    product = tl.full([GROUP, LANES], 1.0, tl.float32)
    total = tl.zeros([GROUP, LANES], tl.float32)
    for i in tl.range(0, tokens, num_stages=3):
        t = first + (tokens - 1 - i if BACK else i)
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        decay = tl.load(DECAY + row * decay_step + channel[None, :], mask=there, other=1).to(tl.float32)
        x = tl.load(INPUTS + row * input_step + channel[None, :], mask=there, other=0).to(tl.float32)
        product *= decay
        total = decay * (total + x) if BACK else decay * total + x
    tl.store(ENDS + summary, product, mask=inside)
    tl.store(ENDS + all_chunks.to(tl.int64) * channels + summary, total, mask=inside)


@triton.jit(do_not_specialize=["count", "lanes"])
def _over_chunks(ENDS, INITIAL, count, lanes, channels, BACK: tl.constexpr, LANES: tl.constexpr):
    """What reaches each chunk from those before it (BACK: after it), written in place of the chunks' sums."""
    inside, place, summary = lanes_of(count, lanes, channels, LANES)
    h = tl.zeros([LANES], tl.float32)
    if not BACK:
        h = tl.load(INITIAL + place, mask=inside, other=0).to(tl.float32)
    SUMS = ENDS + lanes.to(tl.int64) * count
    for i in tl.range(0, count, num_stages=4):
        at = summary + (count - 1 - i if BACK else i) * channels
        product = tl.load(ENDS + at, mask=inside, other=0)
        total = tl.load(SUMS + at, mask=inside, other=0)
        tl.store(SUMS + at, h, mask=inside)
        h = product * h + total


@triton.jit(do_not_specialize=["length", "tokens", "count", "all_chunks"])
def _forward(
    DECAY, INPUTS, INITIAL, ENDS, H, decay_step, input_step, length, tokens, count, all_chunks, channels,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    if count > 1:
        h = tl.load(ENDS + all_chunks.to(tl.int64) * channels + summary, mask=inside, other=0)
    else:
        h = tl.load(INITIAL + summary, mask=inside, other=0).to(tl.float32)
    for i in tl.range(0, tokens, num_stages=3):
        t = first + i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        decay = tl.load(DECAY + row * decay_step + channel[None, :], mask=there, other=1).to(tl.float32)
        x = tl.load(INPUTS + row * input_step + channel[None, :], mask=there, other=0).to(tl.float32)
        h = decay * h + x
        tl.store(H + row * channels + channel[None, :], h, mask=there)


@triton.jit(do_not_specialize=["length", "tokens", "count", "all_chunks"])
def _backward(
    DECAY, GRAD, H, INITIAL, ENDS, TO_DECAY, TO_INPUTS, TO_INITIAL,
    decay_step, grad_step, length, tokens, count, all_chunks, channels, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    start = b[:, None] * channels + channel[None, :]
    begins = inside & (first == 0)[:, None]
    initial = tl.load(INITIAL + start, mask=begins, other=0).to(tl.float32)
    handed = tl.zeros([GROUP, LANES], tl.float32)
    if count > 1:
        handed = tl.load(ENDS + all_chunks.to(tl.int64) * channels + summary, mask=inside, other=0)
    for i in tl.range(0, tokens, num_stages=3):
        t = first + tokens - 1 - i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        place = row * channels + channel[None, :]
        decay = tl.load(DECAY + row * decay_step + channel[None, :], mask=there, other=1).to(tl.float32)
        grad = tl.load(GRAD + row * grad_step + channel[None, :], mask=there, other=0).to(tl.float32)
        before = tl.load(H + place - channels, mask=there & (t > 0)[:, None], other=0).to(tl.float32)
        before = tl.where((t > 0)[:, None], before, initial)
        error = grad + handed
        tl.store(TO_INPUTS + place, error, mask=there)
        tl.store(TO_DECAY + place, error * before, mask=there)
        handed = decay * error
    tl.store(TO_INITIAL + start, handed, mask=begins)
