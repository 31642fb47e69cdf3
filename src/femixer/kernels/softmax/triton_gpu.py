"""The softmax read by fused kernels, forward and backward: see `triton_kernels`. Scores that decay both ways, those of
encoders, are left to torch's attention, which takes their bias some rows at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.softmax import OPERATOR, plain, triton_backward, triton_call, triton_exact, triton_kernels
from femixer.kernels.softmax.triton_call import Call, Tiles, padded
from femixer.kernels.softmax.triton_exact import SIDE
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.triton_launch import all_registers, launch, target_of

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
    gradients = backward_of(call, grads[0], grads[1] if beta is not None else None, found, needed[4])
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
        loaded=call.loaded(tiles.rows),
        BETA=beta,
        EXACT=call.q.dtype == torch.float32,
        TILE=tiles.rows,
        KEYS=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **(all_registers(target_of(call.q)) if call.key_width <= 32 else {}),
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
        **all_registers(target_of(call.q)),
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
    options["CAUSAL"] = call.seen.causal
    launch(
        triton_kernels.streams,
        (pairs * blocks,),
        *operands,
        moved=call.bytes(v, local, exps, tops, shrink),
        exponentials=exps.numel(),
        loaded=pairs * blocks * chunks * call.width * 8,
        **options,
    )
    return exps, shrink


class Found(NamedTuple):
    """What the forward read found: mean and free energy [B, T, H, D], log-normalizers and flags [B, H, T], tops."""

    mean: Tensor
    free: Tensor
    log_z: Tensor
    flags: Tensor
    tops: Tensor


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    bias: Tensor | None
    lam: Tensor | None
    gate: Tensor | None


class Inner(NamedTuple):
    """Gradients of the sums, relative to the tops that rows share: see `triton_backward.inner`."""

    to_mean: Tensor
    to_total: Tensor
    delta: Tensor
    log_z: Tensor
    parts: Tensor


# Rows whose gradients of sums are formed together; a divisor of the rows that share a top.
ROWS = 32


def tiles_of(call: Call) -> tuple[Tiles, Tiles]:
    """For the gradients of keys and values, and for those of queries alone: the largest of a few that spill no
    registers, by the width of what a token has. The more keys a tile has, the less often queries are loaded and added
    to, and the other way round."""
    wide, single = max(padded(call.key_width), 2 * padded(call.width)), call.stream_dtype == torch.float32
    # In three products of TF32 a number has two parts: held for a whole loop, wide tiles would not fit into registers.
    apart = (16 if call.is_hopper else 32) if call.q.dtype == torch.float32 else 0
    apart = apart if padded(call.key_width) >= (64 if call.seen.decays else 128) else 0
    if target_of(call.q).startswith("gfx"):  # with four warps an AMD GPU has twice the registers for each
        if single:
            return Tiles(16, 64 if wide <= 32 else 32, 4, 1), Tiles(16, 32, 4, 1, apart)
        return Tiles(32, 128 if wide <= 64 else 64, 4, 1), Tiles(64 if wide <= 128 else 32, 32, 4, 1)
    if single:
        of_rows = Tiles(16, 32 if wide <= 64 else 16, 8, 1, apart)
        if call.is_hopper:
            of_rows = Tiles(64, 16, 8, 1, apart) if wide <= 64 else of_rows
            return Tiles(16, 64 if wide <= 32 else 32 if wide <= 64 else 16, 8, 1, 32), of_rows
        if wide <= 32:
            return Tiles(16, 16 if call.seen.decays else 32, 8, 1), of_rows
        wide_decays = call.seen.decays and padded(call.key_width) > 64
        return Tiles(16, 16, 8, 1, 64 if wide_decays and target_of(call.q) == "sm_120" else 16), of_rows
    if call.is_hopper:
        of_rows = Tiles(128, 32, 8, 1) if wide <= 64 else Tiles(64 if wide <= 128 else 32, 32, 8, 1)
        if wide <= 64:
            fewer = wide > 32 and call.seen.decays and target_of(call.q) != "sm_90"
            return Tiles(32, 64 if fewer else 128, 8, 1), of_rows
        return Tiles(16, 64 if wide <= 128 else 32, 8, 1), of_rows
    of_rows = Tiles(128 if wide <= 64 else 32, 32, 8, 1)
    return Tiles(32 if wide <= 32 else 16, 64 if wide <= 64 else 32, 8, 1), of_rows


def backward_of(call: Call, by_mean: Tensor | None, by_free: Tensor | None, found: Found, bias_grad: bool) -> Gradients:
    """by_mean: of the gated read if the call has gates.

    One pass over all scores: programs of keys add to the gradients of queries in memory, in the order they come. Where
    torch is asked for results that repeat to the last bit, programs of queries compute the scores a second time.
    """
    beta, device = call.beta, call.q.device
    once = not torch.are_deterministic_algorithms_enabled()
    of_keys, of_rows = tiles_of(call)
    key_tiles = -(-call.keys // of_keys.keys)
    inner, to_lam, to_gate = _inner(call, by_mean, by_free, found, key_tiles)
    to_k, to_v = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (call.k, call.v))
    if once:
        to_q = torch.zeros(call.q.shape, dtype=torch.float32, device=device)
    else:
        to_q = torch.empty(call.q.shape, dtype=call.q.dtype, device=device)
    to_bias, to_sums = None, None
    if call.seen.decays:
        to_sums = torch.empty(call.batch, call.heads, call.keys, dtype=torch.float32, device=device)
    elif bias_grad and call.seen.bias is not None:
        to_bias = torch.zeros(call.seen.bias.shape, dtype=call.seen.bias.dtype, device=device)
    results = Gradients(to_q, to_k, to_v, None, to_bias, to_lam, to_gate)
    tops = call.nothing if beta is None else found.tops
    exps = _to_keys(call, of_keys, tops, inner, results, to_sums, once)
    if not once:
        _to_queries(call, of_rows, tops, inner, exps, results)
    if beta is not None:
        _add_flagged(call, found, inner, results, to_sums, of_keys.keys)
        results = results._replace(beta=inner.parts.sum((0, 2)).to(beta.dtype))
    if to_sums is not None and call.seen.bias is not None:
        # Of sums before tokens, which only what looks ahead reads, and of sums up to them.
        results = results._replace(bias=torch.nn.functional.pad(to_sums.to(call.seen.bias.dtype), (call.keys, 0)))
    return results._replace(q=to_q.to(call.q.dtype))


def _to_keys(
    call: Call, tiles: Tiles, tops: Tensor, inner: Inner, to: Gradients, to_sums: Tensor | None, once: bool
) -> Tensor:
    """Fill the gradients of keys and values, and if `once` those of queries and of the bias; exponentials if not."""
    nothing, beta = call.nothing, call.beta
    exps, streams = nothing, 1 if beta is None else 2
    if beta is not None and not once:
        exps = call.v.new_empty(call.batch, call.groups, call.keys, call.width, dtype=call.stream_dtype)
    key_tiles = -(-call.keys // tiles.keys)
    inputs = call.q, call.k, call.v, nothing if beta is None else beta, *call.masks
    options = {"BETA": beta is not None, "KEYS": call.tiles.keys, "APART": tiles.apart, **call.flags}
    if call.seen.decays and call.q.dtype != torch.float32:
        options |= all_registers(target_of(call.q))
    outputs = (nothing if x is None else x for x in (to.k, to.v, to_sums, to.q, to.bias))
    moved = call.bytes(call.q, call.k, call.v, call.bias, *inner[:4], to.k, to.v)
    # What is added is read and written: in memory once, in the cache by every tile of keys.
    summed = call.pairs // tiles.keys * call.key_width * 4 if once else 0
    launch(
        triton_backward.to_keys,
        (key_tiles * call.batch * call.groups,),
        *(*inputs, tops, *inner[:4], *outputs, exps, inner.parts),
        *(call.rows, call.keys, call.blocks, inner.parts.shape[2], call.repeats * call.row_tiles(ROWS), key_tiles),
        *(call.heads, call.repeats, call.offset, call.window, call.scale),
        *(*call.strides(call.q), *call.strides(call.k), *call.strides(call.v), *call.mask_strides),
        moved=moved + (call.bytes(to.q, to.q, to.bias) if once else 0),
        flops=2 * call.pairs * ((3 if once else 2) * call.key_width + 2 * streams * call.width),
        exponentials=call.pairs,
        loaded=call.loaded(tiles.keys) + summed,
        QUERIES=once,
        BIAS_GRAD=once and to.bias is not None,
        TILE=tiles.rows,
        SIDE=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **options,
    )
    return exps


def _to_queries(call: Call, tiles: Tiles, tops: Tensor, inner: Inner, exps: Tensor, to: Gradients) -> None:
    nothing, beta = call.nothing, call.beta
    row_tiles = call.row_tiles(tiles.rows)
    inputs = call.q, call.k, call.v, nothing if beta is None else beta, *call.masks
    options = {"BETA": beta is not None, "KEYS": call.tiles.keys, "APART": tiles.apart, **call.flags}
    moved = call.bytes(call.q, call.k, call.v, call.bias, *inner[:4], to.q, to.bias)
    launch(
        triton_backward.to_queries,
        (row_tiles * call.batch * call.heads,),
        *(*inputs, tops, *inner[:4], exps, to.q, nothing if to.bias is None else to.bias),
        *(call.rows, call.keys, call.blocks, row_tiles),
        *(call.heads, call.repeats, call.offset, call.window, call.scale),
        *(*call.strides(call.q), *call.strides(call.k), *call.strides(call.v), *call.mask_strides),
        moved=moved,
        flops=2 * call.pairs * (2 * call.key_width + (1 if beta is None else 2) * call.width),
        exponentials=call.pairs,
        loaded=call.loaded(tiles.rows),
        BIAS_GRAD=to.bias is not None,
        TILE=tiles.rows,
        SIDE=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **(all_registers(target_of(call.q)) if call.stream_dtype == torch.float32 or call.key_width > 64 else {}),
        **options,
    )


def _inner(
    call: Call, by_mean: Tensor | None, by_free: Tensor | None, found: Found, key_tiles: int
) -> tuple[Inner, Tensor | None, Tensor | None]:
    nothing, q, beta = call.nothing, call.q, call.beta
    tiles = call.row_tiles(ROWS)
    rows = call.batch, call.heads, call.rows
    to_mean = q.new_empty(*rows, call.width)
    to_total = q.new_empty(*rows, call.width, dtype=call.stream_dtype) if beta is not None else nothing
    delta, log_z = q.new_empty(2, *rows, dtype=torch.float32)
    # Of rows, of keys, and of flagged rows.
    parts = call.repeats * tiles + key_tiles + call.repeats * -(-call.rows // SIDE.value)
    inner = Inner(
        to_mean,
        to_total,
        delta,
        log_z,
        q.new_empty(call.batch, call.groups, parts if beta is not None else 0, call.width, dtype=torch.float32),
    )
    to_lam, to_gate = (
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.lam, call.gate)
    )
    given = by_mean, by_free, found.mean, found.free, found.log_z, found.flags, beta, found.tops, call.lam, call.gate
    results = *inner[:4], to_lam, to_gate, inner.parts
    operands = [nothing if x is None else x.contiguous() for x in given[:8]]
    operands += [nothing if x is None else x for x in (call.lam, call.gate, *results)]
    launch(
        triton_backward.inner,
        (tiles * call.batch * call.heads,),
        *operands,
        *(call.rows, call.blocks, parts, tiles, call.heads, call.repeats, call.offset, call.eps),
        *call.strides(call.lam),
        *call.strides(call.gate),
        moved=call.bytes(*given, *results),
        exponentials=found.mean.numel() * (1 + (call.lam is not None) + 3 * (call.gate is not None)),
        BETA=beta is not None,
        HAS_MEAN=by_mean is not None,
        HAS_FREE=by_free is not None,
        UNIT=call.unit,
        WIDTH=call.flags["WIDTH"],
        width=call.width,
        TILE=ROWS,
        KEYS=call.tiles.keys,
        num_warps=4,
        **call.gate_flags,
    )
    return inner, to_lam, to_gate


def _add_flagged(
    call: Call, found: Found, inner: Inner, results: Gradients, to_sums: Tensor | None, block: int
) -> None:
    row_tiles, key_tiles = -(-call.rows // SIDE.value), -(-call.keys // block)
    inputs = call.q, call.k, call.v, call.beta, *call.masks, found.free, found.flags, found.log_z
    sums = inner.to_mean, inner.to_total, inner.delta
    sizes = call.heads, call.repeats, call.offset, *call.seen_numbers, call.scale
    strides = *call.strides(call.q), *call.strides(call.k), *call.strides(call.v), *call.mask_strides
    launch(
        triton_exact.flagged_rows,
        (row_tiles * call.batch * call.heads,),
        *(*inputs, *sums, results.q, call.nothing if results.bias is None else results.bias, inner.parts),
        *(call.rows, call.keys, inner.parts.shape[2], row_tiles, *sizes),
        *strides,
        moved=call.bytes(found.flags),
        BIAS_GRAD=results.bias is not None,
        num_warps=8,
        **call.widths,
    )
    launch(
        triton_exact.flagged_keys,
        (key_tiles * call.batch * call.groups,),
        *(*inputs, *sums, results.k, results.v, inner.delta if to_sums is None else to_sums),
        *(call.rows, call.keys, key_tiles, *sizes),
        *strides,
        moved=call.bytes(found.flags),
        loaded=call.bytes(found.flags) * ((key_tiles + 1) // 2),
        BLOCK=block,
        num_warps=4 if call.q.dtype == torch.float32 else 8,
        **call.widths,
    )
