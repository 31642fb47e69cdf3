"""Packed documents as other libraries hand them to a model, as segments; and arguments that a model cannot use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What collators of packed documents pass on. The greatest lengths follow from the others.
PACKING = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# What transformers itself reads in the decorators of `forward`, and places that follow from the cache.
SERVED_ELSEWHERE = ("return_dict", "output_hidden_states", "cache_position")
# What its losses read.
OF_THE_LOSS = ("num_items_in_batch", "shift_labels")


def check_arguments(given: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    """Raise a TypeError that names an argument of `forward` that would be ignored; known: what the model reads."""
    for name, value in given.items():
        if name in known or name in SERVED_ELSEWHERE or value is None or value is False:
            continue
        if name == "output_attentions":
            raise TypeError(
                "output_attentions=True is not allowed: weights differ per channel and are never stored; "
                "mixer.inspect(x) or femixer.inspection computes them"
            )
        raise TypeError(f"{name} is not an argument of this model and would be ignored")


def taken_for_loss(given: dict[str, Any], names: tuple[str, ...] = OF_THE_LOSS) -> dict[str, Any]:
    """The arguments of `forward` that only the loss reads, taken out of the others."""
    return {name: given.pop(name) for name in names if name in given}


def packed_segments(
    x: Tensor, segments: Tensor | None, mask: Tensor | None, given: dict[str, Any], seen: int
) -> Tensor | None:
    """Segments int [B, T] of the tokens x [B, T, ...] from what collators give: seq_idx [B, T], numbers of the
    documents; cu_seq_lens_q [n + 1], where they begin in one row; position_ids [B, T], which begin again at zero.

    mask bool [B, T]: False is padding. seen: tokens before x. None where all tokens are one document.
    """
    batch, length = x.shape[:2]
    found = {"segments": segments} if segments is not None else {}
    if (numbers := given.get("seq_idx")) is not None:
        found["seq_idx"] = _checked("seq_idx", numbers, batch, length)
    if (ends := given.get("cu_seq_lens_q")) is not None:
        found["cu_seq_lens_q"] = _of_lengths(ends, given.get("cu_seq_lens_k"), batch, length)
    else:
        for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            if given.get(name) is not None:
                raise ValueError(f"{name} was given without cu_seq_lens_q, which says where documents begin")
    if (positions := given.get("position_ids")) is not None:
        positions = _checked("position_ids", positions, batch, length)
        starts = positions == 0
        if not torch.compiler.is_compiling():
            _check_positions(positions, mask, seen)
        found["position_ids"] = starts.cumsum(1)
    if not found:
        return None
    (name, first), *others = found.items()
    if not torch.compiler.is_compiling():
        for other, ids in others:
            if not torch.equal(_borders(first, mask), _borders(ids, mask)):
                raise ValueError(f"{other} and {name} begin documents at different tokens")
        if name == "position_ids" and not bool(_borders(first, mask).any()):
            return None  # one document: the path without segments is faster
    return first


def _checked(name: str, ids: Tensor, batch: int, length: int) -> Tensor:
    if ids.dim() != 2 or ids.shape[1] != length or ids.shape[0] not in (1, batch):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; allowed is {(batch, length)}")
    return ids.expand(batch, -1).long()


def _of_lengths(ends: Tensor, of_keys: Tensor | None, batch: int, length: int) -> Tensor:
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q needs one row of packed documents, not {batch}")
    if of_keys is not None and not torch.compiler.is_compiling() and not torch.equal(ends, of_keys):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; a document's tokens read that document")
    if not torch.compiler.is_compiling():
        rising = bool((ends.diff() >= 0).all())
        if not rising or int(ends[0]) != 0 or int(ends[-1]) != length:
            raise ValueError(f"cu_seq_lens_q={ends.tolist()} must rise from 0 to the number of tokens, {length}")
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:].contiguous(), right=True)[None]


def _borders(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Where a real token is of another document than the one before."""
    changed = ids[:, 1:] != ids[:, :-1]
    return changed if mask is None else changed & mask[:, 1:] & mask[:, :-1]


def _check_positions(positions: Tensor, mask: Tensor | None, seen: int) -> None:
    """Positions count the real tokens of a document; what they say besides where documents begin cannot be used."""
    before, after = positions[:, :-1], positions[:, 1:]
    odd = (after != before + 1) & (after != 0)
    first = (positions[:, :1] != 0) & (seen == 0)
    if mask is not None:
        odd, first = odd & mask[:, 1:] & mask[:, :-1], first & mask[:, :1]
    if bool(odd.any()) or bool(first.any()):
        raise ValueError(
            "position_ids must count the tokens of each document from 0, one by one; other positions cannot be given"
        )
