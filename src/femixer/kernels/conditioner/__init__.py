"""Features of the time-decay conditioner: SiLU(a_t / |a_t|) * LN(h_t), h_t a decaying sum of the inputs u.

    h_t = sum_{i <= t} exp(-sum_{tau = i+1..t} s_tau) u_i,   s = softplus(logits), a = softplus(logits)

Both ways, the same sum over later tokens i > t, with the gates t..i-1, is added to h.
"""

from __future__ import annotations

from torch import Tensor

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
