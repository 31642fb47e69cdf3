"""Rotary positions: the pair (x_2i, x_2i+1) of a head's channels is rotated by the angle of pair i at its token."""

from __future__ import annotations

from torch import Tensor

from femixer.kernels.operator import declared


@declared(outputs=2, fusible=True)
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    """q [B, T, H, E] and k [B, T, G, E], rotated by angles whose cos and sin are [B or 1, T, E / 2]:

        y_2i = x_2i cos_i - x_2i+1 sin_i,   y_2i+1 = x_2i sin_i + x_2i+1 cos_i

    With a floor the results are the features max(y, 0) + floor. They have the types of q and k and are computed in the
    type of cos and sin, which have no gradients.
    """
    return q.new_empty(q.shape), k.new_empty(k.shape)


OPERATOR = rotate.operator
