"""The softmax read by fused kernels, forward and backward: see `triton_kernels`. Scores that decay both ways, those of
encoders, are left to torch's attention, which takes their bias some rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.softmax import OPERATOR, plain, triton_call, triton_exact, triton_gradients, triton_kernels
from femixer.kernels.softmax.triton_call import Call
from femixer.kernels.softmax.triton_gradients import Found
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.triton_launch import launch

# Key blocks whose largest values one program finds.
CHUNK = 8


def looks_ahead(seen: Visibility) -> bool:
    """Whether scores decay towards keys that come later, which kernels do not have."""
    return seen.decays and not seen.causal


def refuse(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *rest: Any) -> str | None:
    return triton_call.refuse(q, k, v, beta, Visibility(*rest[:5]))


def results(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Mean and free energy [B, T, H, D]; internal: log-normalizers and flags [B, H, T], tops of the key blocks
    [B, G, J + 1, D], and the free energy in float32 where the result has fewer digits."""
    seen = Visibility(*rest[:5])
    if looks_ahead(seen):
        return OPERATOR.results(q, k, v, beta, *rest)
    return empty_results(Call(q, k, v, beta, seen, rest[5], None))


def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    seen = Visibility(*rest[:5])
    if looks_ahead(seen):
        return plain.forward(q, k, v, beta, *rest)
    call = Call(q, k, v, beta, seen, rest[5], None)
    found = empty_results(call)
    mean, free, log_z, flags, tops, precise = found
    read(call, mean, free if precise.numel() == 0 else precise, log_z, flags, tops, call.nothing)
    if precise.numel():
        free.copy_(precise)
    return found


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, beta, *seen, scale = arguments
    if looks_ahead(Visibility(*seen)):
        return plain.backward(grads, arguments, results, needed)
    mean, free, log_z, flags, tops, precise = results
    call = Call(q, k, v, beta, Visibility(*seen), scale, None)
    found = Found(mean, precise if precise.numel() else free, log_z, flags, tops)
    gradients = triton_gradients.backward(call, grads[0], grads[1] if beta is not None else None, found, needed[4])
    return *gradients[:5], None, None


def empty_results(call: Call) -> tuple[Tensor, ...]:
    q, beta = call.q, call.beta
    read_shape = call.batch, call.rows, call.heads, call.width
    row_shape = call.batch, call.heads, call.rows
    half = q.dtype != torch.float32
    return (
        q.new_empty(read_shape),
        q.new_empty(0 if beta is None else read_shape),
        q.new_empty(row_shape, dtype=torch.float32),
        q.new_empty(0 if beta is None else row_shape, dtype=torch.int8),
        q.new_empty(0 if beta is None else tops_shape(call), dtype=torch.float32),
        q.new_empty(0 if beta is None or not half else read_shape, dtype=torch.float32),
    )


def tops_shape(call: Call) -> tuple[int, ...]:
    return call.batch, call.groups, call.blocks + 1, call.width


def read(call: Call, mean: Tensor, free: Tensor, log_z: Tensor, flags: Tensor, tops: Tensor, out: Tensor) -> None:
    """Fill the results; `out` too if the call has gates."""
    nothing, tiles = call.nothing, call.tiles
    exps = shrink = nothing
    if call.beta is not None:
        exps, shrink = make_streams(call, tops)
    size = call.row_tiles(tiles.rows)
    inputs = (call.q, call.k, call.v, *(nothing if x is None else x for x in (call.beta, call.lam, call.gate)))
    strides = [*call.strides(call.q), *call.strides(call.k), *call.strides(call.v)]
    strides += [*call.strides(call.lam), *call.strides(call.gate), *call.mask_strides]
    beta, gated = call.beta is not None, call.gates is not None
    sizes = call.heads, call.repeats, call.offset, call.window, call.scale, call.eps
    moved = call.bytes(call.q, call.k, call.v, call.lam, call.gate, mean, log_z, call.bias)
    moved += call.bytes(free, exps, flags) if beta else 0
    launch(
        triton_kernels.read,
        (size * call.batch * call.heads,),
        *(*inputs, *call.masks, exps, tops if beta else nothing, shrink),
        *(mean, free if beta else nothing, log_z, flags if beta else nothing, out),
        *(call.rows, call.keys, call.blocks, size, *sizes),
        *strides,
        moved=moved + (call.bytes(out) if gated else 0),
        flops=2 * call.pairs * (call.key_width + call.width * (2 if beta else 1)),
        exponentials=call.pairs,
        BETA=beta,
        EXACT=call.q.dtype == torch.float32,
        TILE=tiles.rows,
        KEYS=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **call.flags,
        **call.gate_flags,
    )
    if not beta:
        return
    size = -(-call.rows // triton_exact.SIDE.value)
    launch(
        triton_exact.read_exactly,
        (size * call.batch * call.heads,),
        *(*inputs, *call.masks, mean, free, log_z, flags, out),
        *(call.rows, call.keys, size, *sizes[:3], *call.seen_numbers, *sizes[4:]),
        *strides,
        moved=call.bytes(flags),
        num_warps=8,
        **call.widths,
        **call.gate_flags,
    )


def make_streams(call: Call, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials [B, G, S, D] and the factors by which earlier sums shrink [B, G, J, D]; fills the tops."""
    v, blocks, pairs = call.v, call.blocks, call.batch * call.groups
    chunks = -(-blocks // CHUNK)
    local = v.new_empty(call.batch, call.groups, blocks, call.width, dtype=torch.float32)
    high, low = v.new_empty(2, call.batch, call.groups, chunks, call.width, dtype=torch.float32)
    exps = v.new_empty(call.batch, call.groups, call.keys, call.width, dtype=call.stream_dtype)
    shrink = torch.empty_like(local)
    segments = call.masks[2]
    strides = *call.strides(v), call.mask_strides[5], int(call.of_keys is not None)
    sizes = call.keys, blocks, chunks, call.groups
    options = {
        "UNIT": call.unit,
        "WIDTH": call.flags["WIDTH"],
        "KEYS": call.tiles.keys,
        "BLOCKS": CHUNK,
        "width": call.width,
    }
    operands = v, segments, local, high, low, *sizes, *strides
    launch(triton_kernels.block_ranges, (pairs * chunks,), *operands, moved=call.bytes(v, local), **options)
    operands = v, segments, call.beta, local, high, low, exps, tops, shrink, *sizes, *strides
    moved = call.bytes(v, local, exps, tops, shrink) + pairs * blocks * chunks * call.width * 8
    count = exps.numel()
    options["CAUSAL"] = call.seen.causal
    launch(triton_kernels.streams, (pairs * blocks,), *operands, moved=moved, exponentials=count, **options)
    return exps, shrink
