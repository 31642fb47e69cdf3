"""The read: mean, free energy and posterior of values under a distribution over positions.

Axes: T reading positions, S positions that are read, D channels; leading dimensions broadcast.

    p     [..., T, S]      the prior: for every t a distribution over the S positions, the same for all channels,
          [..., T, S, D]   or one per channel; chosen exactly when p.dim() == v.dim() + 1
    v     [..., S, D]      the values
    beta  inverse temperature: a number, [D], or anything broadcastable to [..., T, D]; 0 is the mean, inf the max

    mu      = sum_s p_s v_s                                         the mean
    F(beta) = log(sum_s p_s exp(beta v_s)) / beta,  F(0) = mu       the free energy, mu <= F <= max v
    q_s     = p_s exp(beta v_s) / sum_r p_r exp(beta v_r)           the posterior, the gradient of F in v

Positions with p = 0 are outside the support, whatever their value: their posterior is exactly 0, and neither p nor v
receives a gradient there. A row without support (padding) has F = 0 and q = 0.

This module is the definition that fast paths are compared with. It computes on dense [..., T, S, D] tensors in float64
for inputs of any dtype, and returns the inputs' dtype.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "effective_weights",
    "free_energy",
    "hidden_temperature",
    "kl_divergence",
    "posterior",
    "posterior_mean",
    "temperature_for_budget",
]

# A function of beta that returns its value and its slope.
Curve = Callable[[Tensor], tuple[Tensor, Tensor]]


def free_energy(p: Tensor, v: Tensor, beta: float | Tensor) -> Tensor:
    """F(beta) = log(sum_s p_s exp(beta v_s)) / beta -> [..., T, D].

    At beta = 0 this is the mean, with the derivative dF/dbeta = Var_p(v) / 2; at beta = inf it is the maximum over the
    support. Weights that do not sum to one are taken literally: F then contains log(sum_s p_s) / beta, and F(0) is
    sum_s p_s v_s. A sum that is one up to rounding counts as one, since rounding divided by a small beta is noise.
    """
    rows = _rows(p, v)
    beta = _control("beta", beta, rows)
    mass_term = _mass_term(rows, beta, p.dtype)
    rows, beta = _limit_of_infinite(rows, beta)
    return (rows.top + _reads(rows, beta).from_top + mass_term).squeeze(-2).to(p.dtype)


def posterior(p: Tensor, v: Tensor, beta: float | Tensor) -> Tensor:
    """q_s = p_s exp(beta v_s) / sum_r p_r exp(beta v_r) -> [..., T, S, D].

    beta = 0 gives p, beta = inf gives p restricted to the positions of the maximum.
    """
    rows = _rows(p, v)
    beta = _control("beta", beta, rows)
    return _tilted(*_limit_of_infinite(rows, beta)).to(p.dtype)


def posterior_mean(p: Tensor, v: Tensor, beta: float | Tensor) -> Tensor:
    """E_q[v] = F(beta) + KL(q || p) / beta -> [..., T, D]: the second readout of the same posterior."""
    rows = _rows(p, v)
    beta = _control("beta", beta, rows)
    rows, beta = _limit_of_infinite(rows, beta)
    return (rows.top + _sum(_tilted(rows, beta) * rows.below)).squeeze(-2).to(p.dtype)


def hidden_temperature(p: Tensor, v: Tensor, beta_max: float | Tensor, lam: float | Tensor) -> Tensor:
    """The unique beta* in [0, beta_max] with F(beta*) = (1 - lam) mu + lam F(beta_max) -> [..., T, D].

    Where v is constant on the support, all temperatures give the same read; the result is then lam * beta_max, the
    limit of vanishing variance. p is normalized first: otherwise F has no limit at beta = 0.
    Twice differentiable in all four arguments.
    """
    rows = _rows(p, v)
    beta_max = _control("beta_max", beta_max, rows, positive=True, finite=True)
    lam = _control("lam", lam, rows, maximum=1.0)
    limit = (lam * beta_max).expand_as(rows.top)
    target = lam * _reads(rows, beta_max).gain

    def curve(beta: Tensor) -> tuple[Tensor, Tensor]:
        reads = _reads(rows, beta)
        return reads.gain - target, reads.slope

    with torch.no_grad():
        root = _increasing_root(curve, limit, torch.zeros_like(limit), beta_max.expand_as(limit), size=target)
        constant = _variance(rows, rows.weights) == 0
    return torch.where(constant, limit, _implicit(curve, root)).squeeze(-2).to(p.dtype)


def temperature_for_budget(p: Tensor, v: Tensor, kl: float | Tensor) -> Tensor:
    """The beta whose posterior spends the budget, KL(q_beta || p) = kl -> [..., T, D].

    q_beta is then the best distribution within the budget: it maximizes E_q[v] over KL(q || p) <= kl. The result is 0
    at kl = 0, and inf where kl >= -log p(argmax v), because the budget suffices for the maximum itself. With constant v
    (every position is a maximum) or an empty support it is inf for every kl > 0. p is normalized first.
    Twice differentiable in all three arguments where the result is positive and finite (at kl = 0 the slope in kl is
    infinite); other results carry no gradient.
    """
    rows = _rows(p, v)
    kl = _control("kl", kl, rows).expand_as(rows.top)

    def curve(beta: Tensor) -> tuple[Tensor, Tensor]:
        return beta.square() * _reads(rows, beta).slope - kl, beta * _variance(rows, _tilted(rows, beta))

    with torch.no_grad():
        largest_kl = -_sum(torch.where(rows.below == 0, rows.weights, 0.0)).log().clamp(max=0.0)
        gap = -torch.where(rows.below < 0, rows.below, -torch.inf).amax(-2, keepdim=True)
        solvable = (kl > 0) & (kl < largest_kl) & gap.isfinite()
        # From this beta on, the weight of every position below the maximum is below rounding.
        saturated = torch.where(solvable, (largest_kl + 60.0) / gap, 1.0)
        small_kl_guess = (2.0 * kl / _variance(rows, rows.weights)).sqrt()
        start = torch.where(solvable & (small_kl_guess < saturated), small_kl_guess, saturated)
        size = torch.where(solvable, kl, torch.inf)
        root = _increasing_root(curve, start, torch.zeros_like(start), saturated, size)
        solvable &= root < saturated
        root = torch.where(solvable, root, 1.0)
        otherwise = torch.where(kl > 0, torch.inf, kl)
    return torch.where(solvable, _implicit(curve, root), otherwise).squeeze(-2).to(p.dtype)


def effective_weights(p: Tensor, v: Tensor, beta_max: float | Tensor, lam: float | Tensor) -> Tensor:
    """(1 - lam) p + lam q(beta_max) -> [..., T, S, D]: the gradient of (1 - lam) mu + lam F(beta_max) in v."""
    rows = _rows(p, v)
    beta_max = _control("beta_max", beta_max, rows, positive=True)
    lam = _control("lam", lam, rows, maximum=1.0)
    posterior_weights = _tilted(*_limit_of_infinite(rows, beta_max))
    return ((1.0 - lam) * rows.mass * rows.weights + lam * posterior_weights).to(p.dtype)


def kl_divergence(q: Tensor, p: Tensor) -> Tensor:
    """KL(q || p) = sum_s q_s log(q_s / p_s) over [..., T, S, D] -> [..., T, D], with 0 log 0 = 0.

    Either argument may be [..., T, S], one dimension fewer than the other: the same distribution for all channels.
    inf where q is positive outside the support of p.
    """
    _check_floating("q", q)
    _check_floating("p", p)
    if q.dtype != p.dtype:
        raise TypeError(f"p has dtype {p.dtype}; it must be that of q, {q.dtype}")
    if abs(q.dim() - p.dim()) > 1 or max(q.dim(), p.dim()) < 3:
        raise ValueError(
            f"q {_shape(q)} and p {_shape(p)}: allowed are [..., T, S, D] and one dimension less, [..., T, S]"
        )
    dtype = q.dtype
    q, p = (_precise(x if x.dim() >= other.dim() else x.unsqueeze(-1)) for x, other in ((q, p), (p, q)))
    if q.shape[-2] != p.shape[-2] or _broadcast(q.shape, p.shape) is None:
        raise ValueError(f"q {_shape(q)} and p {_shape(p)}, as [..., T, S, D], must agree in S and broadcast otherwise")
    outside = ((q > 0) & (p <= 0)).any(-2)
    inside = (q > 0) & (p > 0)
    q, p = (torch.where(inside, x, 1.0) for x in (q, p))
    return torch.where(outside, torch.inf, torch.where(inside, q * (q.log() - p.log()), 0.0).sum(-2)).to(dtype)


class _Rows(NamedTuple):
    """For every (t, channel): a distribution over S positions, and the values relative to their maximum.

    Sums over S keep an axis of length one, so that all fields broadcast to [..., T, S, D].
    """

    support: Tensor  # bool [..., T, S, 1 or D]: p > 0
    weights: Tensor  # [..., T, S, 1 or D]: p divided by its sum; 0 outside the support
    mass: Tensor  # [..., T, 1, 1 or D]: the sum of p; 1 where the support is empty
    top: Tensor  # [..., T, 1, D]: the maximum of v over the support; 0 where that is empty
    below: Tensor  # [..., T, S, D]: v - top, <= 0; 0 outside the support
    mean_below: Tensor  # [..., T, 1, D]: mu - top


class _Reads(NamedTuple):
    from_top: Tensor  # F - top <= 0
    gain: Tensor  # F - mu >= 0, to relative precision also where it is tiny
    slope: Tensor  # dF/dbeta = KL(q || p) / beta^2


def _rows(p: Tensor, v: Tensor) -> _Rows:
    _check_floating("p", p)
    _check_floating("v", v)
    if p.dtype != v.dtype:
        raise TypeError(f"v has dtype {v.dtype}; it must be that of p, {p.dtype}")
    if p.dim() < 2 or v.dim() < 2:
        raise ValueError(f"p {_shape(p)} and v {_shape(v)}: allowed are p [..., T, S] or [..., T, S, D], v [..., S, D]")
    per_channel = p.dim() == v.dim() + 1
    weights = _precise(p if per_channel else p.unsqueeze(-1))
    values = _precise(v).unsqueeze(-3)
    if weights.shape[-2] != values.shape[-2] or values.shape[-2] == 0 or (per_channel and p.shape[-1] != v.shape[-1]):
        layout = "[..., T, S, D], having one dimension more than v" if per_channel else "[..., T, S]"
        raise ValueError(f"p {_shape(p)} is read as {layout}, v {_shape(v)} as [..., S, D]: S >= 1 and D must agree")
    if _broadcast(weights.shape[:-3], values.shape[:-3]) is None:
        raise ValueError(f"the leading dimensions of p {_shape(p)} and v {_shape(v)} do not broadcast")
    if not (weights >= 0).all():
        raise ValueError("p has negative or NaN entries; it must be a distribution over S, so every entry is >= 0")

    support = weights > 0
    weights = torch.where(support, weights, 0.0)
    mass = _sum(weights)
    present = mass > 0
    mass = torch.where(present, mass, 1.0)
    weights = weights / mass
    # The shift is detached: the results do not depend on it.
    top = torch.where(support, values.detach(), -torch.inf).amax(-2, keepdim=True)
    top = torch.where(present, top, 0.0)
    below = torch.where(support, values - top, 0.0)
    return _Rows(support, weights, mass, top, below, _sum(weights * below))


def _reads(rows: _Rows, beta: Tensor) -> _Reads:
    near = beta * -rows.mean_below <= 30.0
    if near.all():
        return _reads_near_mean(rows, beta)
    # Each formula gets a harmless beta where the other is chosen: a NaN that `where` discards still has a NaN gradient.
    from_mean = _reads_near_mean(rows, torch.where(near, beta, 0.0))
    from_top = _reads_near_top(rows, torch.where(near, 1.0, beta))
    return _Reads(*(torch.where(near, x, y) for x, y in zip(from_mean, from_top, strict=True)))


def _reads_near_mean(rows: _Rows, beta: Tensor) -> _Reads:
    """The reads while exp(beta (v - mu)) is moderate, beta = 0 included.

    With d = v - mu, y = beta d and Z = E_p[exp(y)], so that F = mu + log(Z) / beta: E_p[y] = 0 turns Z - 1 into a sum
    without cancellation, from which beta divides out,
        Z - 1 = beta^2 A,   A = E_p[d^2 phi(y)],   phi(y) = (exp(y) - 1 - y) / y^2
        F - mu = beta A L,  L = log(1 + x) / x at x = beta^2 A
        dF/dbeta = (E_q[d] - (F - mu)) / beta = E_p[d^2 (1 + y phi(y))] / Z - A L
    so beta = 0 needs no special case, not even for derivatives.
    """
    distance = rows.below - rows.mean_below
    y = beta * distance
    remainder = _exp_remainder(y)
    weighted_square = rows.weights * distance.square()
    curvature = _sum(weighted_square * remainder)
    excess = beta.square() * curvature
    ratio = curvature * _log1p_ratio(excess)
    gain = beta * ratio
    slope = _sum(weighted_square * (1.0 + y * remainder)) / (1.0 + excess) - ratio
    return _Reads(rows.mean_below + gain, gain, slope)


def _reads_near_top(rows: _Rows, beta: Tensor) -> _Reads:
    """The reads at a positive beta: F - top = log(sum_s exp(log p_s + beta (v_s - top))) / beta."""
    exponent = _exponent(rows, beta)
    from_top = exponent.logsumexp(-2, keepdim=True) / beta
    slope = (_sum(exponent.softmax(-2) * rows.below) - from_top) / beta
    return _Reads(from_top, from_top - rows.mean_below, slope)


def _exponent(rows: _Rows, beta: Tensor) -> Tensor:
    """log p + beta (v - top) on the support; elsewhere a finite number, so that an empty row has no NaN."""
    log_weights = torch.where(rows.support, rows.weights, 1.0).log()
    return torch.where(rows.support, log_weights + beta * rows.below, torch.finfo(rows.below.dtype).min)


def _tilted(rows: _Rows, beta: Tensor) -> Tensor:
    """The posterior at a finite beta, [..., T, S, D]."""
    return torch.where(rows.support, _exponent(rows, beta).softmax(-2), 0.0)


def _limit_of_infinite(rows: _Rows, beta: Tensor) -> tuple[_Rows, Tensor]:
    """Replace beta = inf by beta = 0 on the prior restricted to the maximum, which gives the same read."""
    infinite = beta.isinf()
    if not infinite.any():
        return rows, beta
    support = rows.support & ~(infinite & (rows.below < 0))
    weights = torch.where(support, rows.weights, 0.0)
    mass = _sum(weights)
    weights = weights / torch.where(mass > 0, mass, 1.0)
    below = torch.where(support, rows.below, 0.0)
    rows = rows._replace(support=support, weights=weights, below=below, mean_below=_sum(weights * below))
    return rows, torch.where(infinite, 0.0, beta)


def _mass_term(rows: _Rows, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """F of p minus F of p / sum(p): log(sum(p)) / beta, or (sum(p) - 1) mu at beta = 0."""
    size = rows.support.shape[-2]
    epsilon = torch.finfo(dtype).eps
    mass = rows.mass.detach()
    is_one = (mass - 1.0).abs() <= (16.0 + math.sqrt(size)) * epsilon
    mass = torch.where(is_one, rows.mass - mass + 1.0, rows.mass)
    # On the simplex the terms 1 / beta in the gradient of p cancel; for a tiny beta only rounding errors would remain.
    as_mean = (beta == 0) | is_one & (beta < math.sqrt(epsilon))
    mean = rows.top + rows.mean_below
    return torch.where(as_mean, (mass - 1.0) * mean, mass.log() / torch.where(as_mean, 1.0, beta))


def _variance(rows: _Rows, weights: Tensor) -> Tensor:
    mean = _sum(weights * rows.below)
    return _sum(weights * (rows.below - mean).square())


def _exp_remainder(y: Tensor) -> Tensor:
    """phi(y) = (exp(y) - 1 - y) / y^2, with phi(0) = 1/2."""
    tiny = y.abs() < 0.03
    series = torch.zeros_like(y)
    for order in range(7, 1, -1):
        series = series * y + 1.0 / math.factorial(order)
    away = torch.where(tiny, 1.0, y)
    return torch.where(tiny, series, (away.expm1() - away) / away.square())


def _log1p_ratio(x: Tensor) -> Tensor:
    """log(1 + x) / x for x >= 0, with the value 1 at 0."""
    tiny = x < 1e-8
    away = torch.where(tiny, 1.0, x)
    return torch.where(tiny, 1.0 - 0.5 * x, away.log1p() / away)


def _increasing_root(curve: Curve, start: Tensor, low: Tensor, high: Tensor, size: Tensor) -> Tensor:
    """The root in [low, high] of an increasing curve; `size` is the magnitude of the terms that cancel at the root.

    Newton's method, with a bisection step wherever Newton leaves the bracket or fails to halve the previous step.
    """
    epsilon = torch.finfo(start.dtype).eps
    root, previous = start, high - low
    found = torch.zeros_like(start, dtype=torch.bool)
    for _ in range(200):
        value, slope = curve(root)
        low = torch.where(value < 0, root, low)
        high = torch.where(value > 0, root, high)
        newton = -value / slope
        inside = (root + newton >= low) & (root + newton <= high)
        exact = ~(value.abs() > 2.0 * epsilon * size) | (high - low <= 2.0 * epsilon * root)
        # Newton squares the relative error, so this step is the last.
        close = inside & (newton.abs() <= math.sqrt(epsilon) * root)
        trusted = inside & (2.0 * newton.abs() <= previous.abs()) | close
        step = torch.where(trusted, newton, 0.5 * (low + high) - root)
        found |= exact
        root = torch.where(found, root, root + step)
        found |= close
        if found.all():
            break
        previous = step
    return torch.where(value.isnan(), value, root)


def _implicit(curve: Curve, root: Tensor) -> Tensor:
    """The root as a differentiable function of the curve's parameters: same value, first and second derivatives.

    One Newton step from a constant root is exact to first order in the parameters, two are exact to second order.
    """
    for _ in range(2):
        value, slope = curve(root)
        if not value.requires_grad:
            break
        step = -value / torch.where(slope > 0, slope, torch.inf)
        root = root + (step - step.detach())
    return root


def _sum(x: Tensor) -> Tensor:
    return x.sum(-2, keepdim=True)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # Apple GPUs have no float64


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _check_floating(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a floating-point tensor")
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; it must be a floating-point tensor")


def _control(
    name: str,
    x: float | Tensor,
    rows: _Rows,
    positive: bool = False,
    finite: bool = False,
    maximum: float = math.inf,
) -> Tensor:
    """A checked beta, lambda or budget, as [..., T, 1, D] or less."""
    if isinstance(x, bool) or not isinstance(x, int | float | Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a number or a floating-point tensor")
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=rows.below.dtype, device=rows.below.device)
    _check_floating(name, x)
    *batch, t, _, d = rows.below.shape
    result = (*batch, t, d)
    if _broadcast(x.shape, result) != result:
        raise ValueError(f"{name} {_shape(x)} does not broadcast to [..., T, D] = {list(result)}")
    x = _precise(x)
    allowed = (x > 0 if positive else x >= 0) & (x <= maximum)
    if finite:
        allowed &= x.isfinite()
    if not allowed.all():
        interval = f"{'(' if positive else '['}0, {maximum:g}{')' if finite else ']'}"
        raise ValueError(f"{name} has the value {x[~allowed][0].item()}; allowed is {interval}")
    return x.unsqueeze(-2) if x.dim() else x
