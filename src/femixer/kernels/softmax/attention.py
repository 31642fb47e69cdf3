"""Scaled dot-product attention with its backward in our hands: torch's own kernels, called by name.

| device | forward and backward |
|---|---|
| CPU | flash attention for CPUs; all widths equal |
| CUDA, ROCm | memory-efficient attention: float32 too, masks and their gradients; flash attention for half precision |
| meta | as on CUDA: shapes and operations of a GPU, without data |
| others, float64 on a GPU | F.scaled_dot_product_attention, and a written-out backward by blocks of rows |
| any, under torch.func | matrix products and softmax |

Axes: B batch, H heads, T queries, S keys; q [B, H, T, E], k [B, H, S, E], v [B, H, S, W], mask
[B or 1, H or 1, T, S], added to the scores. Causal: query t sees the keys up to t.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.streams import transparent

aten = torch.ops.aten

# Scores that the written-out backward holds at a time.
SCORES = 2**24
# GPU kernels want channels, and the keys of a mask, in multiples of this.
MULTIPLE = 8
_HALF = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """-> (output [B, H, T, W], log-normalizers [B, H, T] that the backward wants, or something empty)."""
    if torch._C._are_functorch_transforms_active():
        return _written_out(q, k, v, mask, causal, scale), q.new_empty(q.shape[:3])
    q, k, v, mask = _side_by_side(q, k, v, mask)
    if not _has_own_kernel(q) or transparent(q):
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
        return out, q.new_empty(q.shape[:3])
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if _by_flash(q, v, mask):
        out, log_z, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        mask = _aligned(mask, q, k)
        out, log_z, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)
    return out, log_z[:, :, : q.shape[2]]


_seed = functools.cache(lambda device: torch.empty((), dtype=torch.long, device=device))  # of no dropout


class Attended(NamedTuple):
    """A call of `attend` and its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    out: Tensor
    log_z: Tensor


def attend_backward(
    grad: Tensor, call: Attended, mask_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, and of the mask if it is wanted, which torch's kernel for CPUs does not have."""
    q, k, v, mask, causal, scale, out, log_z = call
    if not _has_own_kernel(q) or (mask_grad and q.device.type == "cpu"):
        return written_out_backward(grad, call, mask_grad)
    grad, q, k, v, out, mask = _side_by_side(grad, q, k, v, out, mask)
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_z, 0.0, causal, attn_mask=mask, scale=scale
        )
        return *grads, None
    seed = _seed(q.device)
    if _by_flash(q, v, mask):
        ends = None, None, q.shape[2], k.shape[2]
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, log_z.contiguous(), *ends, 0.0, causal, seed, seed, scale=scale
        )
        return *grads, None
    if torch.version.hip is None and q.shape[2] % 32:
        log_z = F.pad(log_z, (0, -q.shape[2] % 32), value=math.inf)  # the kernel reads whole blocks of 32 rows
    wanted = [True, True, True, mask_grad and mask is not None]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(mask, q, k), out, log_z.contiguous(), seed, seed, 0.0, wanted, causal, scale=scale
    )


def _side_by_side(*tensors: Any) -> tuple[Any, ...]:
    """With the channels of a head, or the keys of a mask, next to each other in memory, as torch's kernels take for
    granted (of a mask, torch 2.6 does)."""
    return tuple(x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors)


def widths(device: torch.device, keys: int, values: int) -> tuple[int, int]:
    """To which width queries and keys of some width, and values, are padded for a device."""
    if device.type == "cpu":
        return max(keys, values), max(keys, values)
    return -(-keys // MULTIPLE) * MULTIPLE, -(-values // MULTIPLE) * MULTIPLE


def heads_first(x: Tensor, heads: int, width: int, value: float = 0.0) -> Tensor:
    """[B, S, G, W] -> [B, H, S, width]: key/value heads repeated, width padded with a value."""
    x = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]), value=value)).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def fold(x: Tensor, groups: int, width: int) -> Tensor:
    """The transpose of heads_first: [B, H, S, W] -> [B, S, G, width], repeats summed."""
    if x.shape[1] != groups:
        x = x.unflatten(1, (groups, -1)).sum(2)
    return x.transpose(1, 2)[..., :width]


def _has_own_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu" or (q.device.type in ("cuda", "meta") and q.dtype != torch.float64)


def _by_flash(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    return mask is None and q.dtype in _HALF and q.shape[3] == v.shape[3] <= 256


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as GPU kernels read it: expanded, rows at aligned places."""
    if mask is None:
        return None
    if mask.shape[3] % MULTIPLE:
        mask = F.pad(mask, (0, -mask.shape[3] % MULTIPLE))[..., : mask.shape[3]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention as transforms of torch.func know it: torch's kernel has no rule for batches of batches."""
    scores = q * scale @ k.mT
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def written_out_backward(
    grad: Tensor, call: Attended, mask_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The backward from softmax's derivative, for as many rows at a time as have SCORES scores."""
    q, k, v, mask, causal, scale, out, _ = call
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dq, dmask = [], []
    inner = (grad * out).sum(-1, keepdim=True)
    step = max(1, SCORES // max(1, batch * heads * keys))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        until = rows.stop if causal else keys
        scores = q[:, :, rows] * scale @ k[:, :, :until].mT
        if mask is not None:
            scores = scores + mask[:, :, rows]
        if causal:
            future = torch.ones(rows.stop - start, until, dtype=torch.bool, device=q.device).triu(start + 1)
            scores = scores.masked_fill(future, -torch.inf)
        p = scores.softmax(-1)
        dscores = p * (grad[:, :, rows] @ v[:, :, :until].mT - inner[:, :, rows])
        dv[:, :, :until] += p.mT @ grad[:, :, rows]
        dk[:, :, :until] += dscores.mT @ (q[:, :, rows] * scale)
        dq.append(dscores @ k[:, :, :until] * scale)
        if mask_grad:
            dmask.append(dscores)
    return torch.cat(dq, 2), dk, dv, torch.cat(dmask, 2) if mask_grad else None
