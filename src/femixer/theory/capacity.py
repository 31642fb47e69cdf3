"""What a read can select: patterns of positions, convex hulls, ranks, and heads of finitely many features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from femixer.mixer import FreeEnergyMixer


def patterns(weights: Tensor) -> set[tuple[int, ...]]:
    """How channels choose positions in N contexts: weights [N, S, D] -> the different tuples of D arg-maxima."""
    return set(map(tuple, weights.argmax(1).tolist()))


def most_patterns(positions: int, channels: int, heads: int | None = None, layers: int = 1) -> int:
    """t^D where every channel chooses for itself (heads=None); t^min(D, H L) where the channels of a head choose
    together and a channel is mixed first in one of L layers."""
    return positions ** (channels if heads is None else min(channels, heads * layers))


def hull_gap(v: Tensor) -> Tensor:
    """How far the channel-wise maximum m of v [..., S, D] lies outside conv{v_i}: sum_j m_j - max_i sum_j v_ij >= 0.

    w . m - max_i w . v_i at w = (1, ..., 1), so every mean is off by so much in the sum of its channels. It is zero
    exactly where one position has all maxima.
    """
    return v.amax(-2).sum(-1) - v.sum(-1).amax(-1)


def mixed_difference(read: Callable[[Tensor], Tensor], low: float = 0.0, high: float = 1.0) -> Tensor:
    """f(h, h) - f(h, l) - f(l, h) + f(l, l) of a read of the values of two positions [2, 1] -> [...].

    Zero for every sum over tokens f(x, y) = a(x) + b(y), so a read with the mixed difference M is at least |M| / 4 away
    from such a sum at one of the four corners. The maximum has l - h.
    """
    corners = {(x, y): read(torch.tensor([[x], [y]], dtype=torch.float64)) for x in (low, high) for y in (low, high)}
    return corners[high, high] - corners[high, low] - corners[low, high] + corners[low, low]


def value_ranks(mixer: FreeEnergyMixer) -> list[int]:
    """rank(W_O^(h) W_V^(h)) of every head: at most its value channels."""
    width = mixer.widths.value
    values = mixer.value_proj.linear.weight[: mixer.kv_heads * width].unflatten(0, (mixer.kv_heads, width))
    values = values.repeat_interleave(mixer.heads // mixer.kv_heads, 0)
    outputs = mixer.out_proj.weight.unflatten(1, (mixer.heads, width)).transpose(0, 1)
    return [int(torch.linalg.matrix_rank((o @ v).double())) for o, v in zip(outputs, values, strict=True)]


class Cost(NamedTuple):
    """Of one layer: numbers of parameters, floating-point operations of its matrix products, numbers of weights p."""

    parameters: int
    flops: int
    weights: int


def per_dimension_cost(dim: int, length: int, heads: int, key_width: int) -> Cost:
    """Of attention over `length` tokens whose `heads` score with queries and keys of `key_width` and share dim values:

        parameters  2 dim (heads key_width) + 2 dim^2
        operations  2 T (parameters) + 2 T^2 (heads key_width) + 2 T^2 dim
        weights     heads T^2

    Attention has heads key_width = dim. A scoring subspace of its own for every channel is heads = dim: key_width times
    attention's scores, dim / H times its weights; or key_width = 1 at equal cost, where a head is nearly a fixed state.
    """
    scores = heads * key_width
    parameters = 2 * dim * scores + 2 * dim**2
    return Cost(parameters, 2 * length * parameters + 2 * length**2 * (scores + dim), heads * length**2)


def exponential_tail(radius: float, degree: int) -> float:
    """sum_{n > N} R^n / n!"""
    return math.fsum(math.exp(n * math.log(radius) - math.lgamma(n + 1)) for n in range(degree + 1, degree + 400))


def minimal_degree(radius: float, epsilon: float) -> int:
    """The smallest N with exponential_tail(R, N) <= eps: a softmax head with scores within R is, up to eps, a linear
    head with binomial(N + width, width) features."""
    return next(degree for degree in itertools.count() if exponential_tail(radius, degree) <= epsilon)


def monomial_features(x: Tensor, degree: int) -> Tensor:
    """All x^a / sqrt(a!) with |a| <= degree: [..., width] -> [..., binomial(degree + width, width)], so that
    phi(q) . phi(k) is the Taylor sum of exp(q . k)."""
    exponents = [a for a in itertools.product(range(degree + 1), repeat=x.shape[-1]) if sum(a) <= degree]
    powers = torch.tensor(exponents, dtype=x.dtype)
    scale = torch.tensor([math.prod(math.factorial(n) for n in a) for a in exponents], dtype=x.dtype).sqrt()
    return (x.unsqueeze(-2) ** powers).prod(-1) / scale


def linearized_head(q: Tensor, k: Tensor, v: Tensor, degree: int) -> Tensor:
    """The causal softmax head of q, k [T, width] and v [T, D] read from a state that does not grow: [T, D],

    o_t = phi(q_t) S_t / phi(q_t) z_t,  S_t = sum_{i <= t} phi(k_i) v_i^T,  z_t = sum_{i <= t} phi(k_i).
    """
    of_q, of_k = monomial_features(q, degree), monomial_features(k, degree)
    state = torch.einsum("im,ic->imc", of_k, v).cumsum(0)
    return torch.einsum("tm,tmc->tc", of_q, state) / (of_q * of_k.cumsum(0)).sum(-1, keepdim=True)
