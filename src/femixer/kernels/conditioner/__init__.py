"""Features of the time-decay conditioner: SiLU(a_t / |a_t|) * LN(h_t), h_t a decaying sum of the inputs u.

    h_t = sum_{i <= t} exp(-sum_{tau = i+1..t} s_tau) u_i,   s = softplus(logits), a = softplus(logits)

Both ways, the same sum over later tokens i > t, with the gates t..i-1, is added to h.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import END, PADDING, START
from femixer.kernels.operator import declared, wide_dtype
from femixer.kernels.reading import state_dtype


# The internal result is the sums over earlier tokens and, both ways, those over later ones, [B, T, C or 2 C],
# or what another backend keeps.
@declared(outputs=3, internal=1)
def condition(
    y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """y [B, T, 3 C] = [logits of s, u, logits of a] -> features [B, T, C] and the state after the last token [B, C], in
    float32 or better.

    marks int8 [B, T]: see femixer.kernels.marks. initial [B, C]: the state before the first token, None for zero. eps:
    of the layer norm.
    """
    batch, length, channels = y.shape[0], y.shape[1], y.shape[2] // 3
    sums = y.new_empty(batch, length, channels if causal else 2 * channels, dtype=state_dtype(y.device))
    last = y.new_empty(batch, channels, dtype=wide_dtype(y))
    return y.new_empty(batch, length, channels), last, sums  # type: ignore[return-value]


OPERATOR = condition.operator


def definition(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    """Token by token in float64."""
    s, u, a = y.double().chunk(3, -1)
    decay = torch.sigmoid(-s)  # exp(-softplus(s))
    marks = torch.zeros(y.shape[:2], dtype=torch.int8) if marks is None else marks
    state = u.new_zeros(u.shape[0], u.shape[2]) if initial is None else initial.double()
    h, later = [], []
    for t in range(y.shape[1]):
        kept = torch.where(_are(marks, t, START), 0, state) * torch.where(_are(marks, t, PADDING), 1, decay[:, t])
        state = kept + torch.where(_are(marks, t, PADDING), 0, u[:, t])
        h.append(state)
    ahead = torch.zeros_like(state)
    for t in reversed(range(y.shape[1])):
        reached = torch.where(_are(marks, t, END), 0, ahead) * torch.where(_are(marks, t, PADDING), 1, decay[:, t])
        later.append(torch.zeros_like(reached) if causal else reached)
        ahead = reached + torch.where(_are(marks, t, PADDING), 0, u[:, t])
    if not h:
        return u, state
    total = torch.stack(h, 1) + torch.stack(later[::-1], 1)
    direction = F.normalize(F.softplus(a), dim=-1)
    return F.silu(direction) * F.layer_norm(total, total.shape[-1:], eps=eps), state


def _are(marks: Tensor, t: int, bit: int) -> Tensor:
    return (marks[:, t, None] & bit).bool()


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(batch: int, length: int, channels: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, length, 3 * channels), torch.randn(batch, channels)

    y, initial = drawn(3, 37, 5)
    marks = torch.zeros(3, 37, dtype=torch.int8)
    marks[0, [0, 1, 5, 11, 12, 36]] = PADDING
    for row, (first, last) in ((0, (2, 6)), (0, (7, 35)), (1, (0, 0)), (1, (1, 36)), (2, (9, 30))):
        marks[row, first] |= START
        marks[row, last] |= END
    long, start = drawn(1, 293, 3)
    long[..., :3] -= 5  # memories of hundreds of tokens
    far = drawn(2, 17, 3)[0] * torch.tensor([20.0, 20, 5]).repeat_interleave(3)
    return {
        "causal": (y, None, initial, True, 1e-5),
        "both ways": (y, None, None, False, 1e-5),
        "marks": (y, marks, initial, True, 1e-5),
        "marks both ways": (y, marks, initial, False, 1e-5),
        "long": (long, None, start, True, 1e-5),
        "long both ways": (long, None, None, False, 1e-5),
        "large logits": (far, None, None, True, 1e-5),
        "one token": (*_with_marks(drawn(2, 1, 7)), True, 1e-5),
        "no token": (*_with_marks(drawn(2, 0, 7)), True, 1e-5),
    }


def _with_marks(given: tuple[Tensor, Tensor]) -> tuple[Tensor, None, Tensor]:
    return given[0], None, given[1]
