"""Marks of tokens, int8 [B, T]: what a scan along time does there. None stands for marks of zero everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

# Bits. Padding is skipped: weight zero and decay one. At a segment's first token the past is forgotten; its last one is
# the first for a scan backwards in time.
PADDING, START, END = 1, 2, 4
# As compiled kernels take it for none.
NO_MARKS = torch.empty(0, 0, dtype=torch.int8, device="cpu")


def reversed_marks(marks: Tensor | None) -> Tensor | None:
    """For a scan of the same tokens in reversed order, in that order."""
    if marks is None:
        return None
    return ((marks & PADDING) | (marks & START) * (END // START) | (marks & END) // (END // START)).flip(1)


def is_padding(marks: Tensor) -> Tensor:
    return (marks & PADDING).bool()


def is_start(marks: Tensor) -> Tensor:
    return (marks & START).bool()


def is_end(marks: Tensor) -> Tensor:
    return (marks & END).bool()
