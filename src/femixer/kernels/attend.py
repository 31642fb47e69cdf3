"""Scaled dot-product attention with its backward in our hands, in pieces where visibility needs a mask.

Axes: B batch, T queries, S keys, H heads, W width of queries, keys and values alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A mask is made for as many rows at a time as keep it below this size.
MASK_ELEMENTS = 2**22


class Geometry(NamedTuple):
    """Who sees whom, apart from the score."""

    bias: Tensor | None
    run_q: Tensor | None
    run_k: Tensor | None
    causal: bool
    window: int | None

    def needs_no_mask(self, keys: int) -> bool:
        """Apart from causality, every query sees all `keys`."""
        return self.bias is None and self.run_q is None and (self.window is None or self.window >= keys)


class Piece(NamedTuple):
    """One attention call: these rows over these keys, under a float mask, the triangular one, or none."""

    rows: slice
    keys: slice
    mask: Tensor | None
    triangular: bool


def pieces(q: Tensor, k: Tensor, g: Geometry) -> Iterator[Piece]:
    t, s = q.shape[1], k.shape[1]
    whole = slice(0, t), slice(0, s)
    plain = g.needs_no_mask(s)
    if plain and (not g.causal or t == 1):
        yield Piece(*whole, None, False)
        return
    if plain and t == s:
        yield Piece(*whole, None, True)
        return
    rank_q: Tensor
    rank_k: Tensor
    if g.run_q is None or g.run_k is None:
        rank_k = torch.arange(s, device=q.device)[None]
        rank_q = rank_k[:, s - t :]
    else:
        rank_k = (g.run_k >= 0).cumsum(1)
        rank_q = rank_k[:, s - t :]
    masks = 1
    if g.bias is not None:
        masks = q.shape[0] * q.shape[2]
    elif g.run_q is not None:
        masks = q.shape[0]
    step = max(64, MASK_ELEMENTS // (s * masks))
    if g.window is not None and g.run_q is None:
        step = min(step, max(128, g.window))
    index = torch.arange(s, device=q.device)
    for start in range(0, t, step):
        rows = slice(start, min(start + step, t))
        low, high = 0, s
        if g.causal:
            high = rows.stop + s - t
        if g.window is not None and g.run_q is None:
            low = max(0, start + s - t - g.window + 1)
            high = min(high, rows.stop + s - t + g.window - 1)
        keys = slice(low, high)
        hidden = torch.zeros(1, rows.stop - start, high - low, dtype=torch.bool, device=q.device)
        if g.causal:
            hidden = hidden | (index[keys] > index[s - t + start : s - t + rows.stop, None])
        if g.window is not None:
            hidden = hidden | ((rank_q[:, rows, None] - rank_k[:, None, keys]).abs() >= g.window)
        if g.run_q is not None and g.run_k is not None:
            hidden = hidden | (g.run_q[:, rows, None] != g.run_k[:, None, keys]) | (g.run_k[:, None, keys] < 0)
            # A padding row has nothing to see; let it see everything, its result is thrown away.
            hidden = hidden & (g.run_q[:, rows, None] >= 0)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)[:, None]
        if g.bias is not None:
            mask = g.bias[:, :, rows, keys].to(q.dtype)
        yield Piece(rows, keys, mask.masked_fill(hidden[:, None], -torch.inf), False)


def has_own_kernel(q: Tensor) -> bool:
    """torch's CPU kernel and its backward can be called by name; elsewhere the backward is written out, by rows."""
    return q.device.type == "cpu"


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [B, H, T, W] tensors of one width -> (output, log-normalizer that the backward wants)."""
    if has_own_kernel(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return out, q.new_empty(q.shape[0], q.shape[1], q.shape[2])


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_z: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if has_own_kernel(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_z, 0.0, causal, attn_mask=mask, scale=scale
        )
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = max(64, MASK_ELEMENTS // max(1, k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        scores = q[:, :, rows] @ k.mT * scale
        if mask is not None:
            scores = scores + (mask[:, :, rows] if mask.shape[2] > 1 else mask)
        if causal:
            key = torch.arange(k.shape[2], device=q.device)
            scores = scores.masked_fill(key > key[rows, None], -torch.inf)
        p = scores.softmax(-1)
        inner = grad[:, :, rows]
        dv += p.mT @ inner
        ds = p * (inner @ v.mT - (inner * out[:, :, rows]).sum(-1, keepdim=True)) * scale
        dq[:, :, rows] = ds @ k
        dk += ds.mT @ q[:, :, rows]
    return dq, dk, dv


def products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [B, T, H, W] tensors to all tokens by matrix products -> (output, weights [H, B, T, T]).

    For short sequences: with the weights kept the backward is a third faster than that of torch's kernel.
    """
    batch, length, heads = q.shape[:3]
    weights = q.new_empty(heads, batch, length, k.shape[1])
    out = q.new_empty(heads, batch, length, v.shape[3])
    for h, p in enumerate(weights):  # head by head, whose weights stay in the cache
        torch.baddbmm(p, q[:, :, h], k[:, :, h].mT, beta=0, alpha=scale, out=p)
        torch.ops.aten._softmax.out(p, -1, False, out=p)
        torch.bmm(p, v[:, :, h], out=out[h])
    return out.permute(1, 2, 0, 3), weights


def products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    slope = torch.empty_like(weights[0])
    dq, dk, dv = (x.new_empty(x.shape[2], x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v))
    for h, p in enumerate(weights):
        torch.bmm(grad[:, :, h], v[:, :, h].mT, out=slope)
        torch.ops.aten._softmax_backward_data.out(slope, p, -1, slope.dtype, grad_input=slope)
        torch.baddbmm(dq[h], slope, k[:, :, h], beta=0, alpha=scale, out=dq[h])
        torch.baddbmm(dk[h], slope.mT, q[:, :, h], beta=0, alpha=scale, out=dk[h])
        torch.bmm(p.mT, grad[:, :, h], out=dv[h])
    return dq.permute(1, 2, 0, 3), dk.permute(1, 2, 0, 3), dv.permute(1, 2, 0, 3)
