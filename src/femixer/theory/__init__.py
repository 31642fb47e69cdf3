"""The paper's theory as functions: the tangent kernel of a mixer, by group of parameters and by path, derivatives of
the read in the prior, and what a read can select: patterns of positions, convex hulls, ranks, heads of finitely many
features. `femixer theory` (command.py) prints the tables of docs/theory.md and draws its figures.

The neural tangent kernel is that of a mixer y [T, J] of one sequence (paper appendix "FEM-MLP Interaction"):

    K[(t, j), (s, j')] = < d y_tj / d theta, d y_sj' / d theta >

Axes: T tokens that read, S that are read, C channels of all heads, J channels of the output. Here, as in the paper's
main text, the outer gate scales the channels before the output projection, y_tj = sum_c O_jc g_tc u_tc with
u = (1 - lam) mu + lam F, and the gates are projections of the token t. The paper's appendix writes o = g * (O u): there
the gate leaves the sum over c.

A kernel of all parameters is the sum of the kernels of its groups: no cross terms. Cross terms are between paths
through one and the same parameter (`value_paths`), and these have one path only where the gates do not look at the
values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from femixer.free_energy import effective_weights, free_energy, kl_divergence, posterior
from femixer.gates import EPS, LEAST_ODDS, outer_gate, temperature_gate
from femixer.mixer import FreeEnergyMixer


def log_weight_hessian(weights: Tensor, v: Tensor, beta: float | Tensor) -> Tensor:
    """The second derivative of F = log(sum_i exp(w_i + beta v_i)) / beta in the log-weights w -> [..., T, D, S, S]:

        (Diag(q) - q q^T) / beta,    q the posterior

    weights = exp(w) need not sum to one. It is a covariance, so F is convex in w; its norm is at most 1 / (2 beta).
    """
    q = posterior(weights, v, beta).transpose(-1, -2)
    beta = torch.as_tensor(beta, dtype=q.dtype)
    beta = beta[..., None, None] if beta.dim() else beta
    return (torch.diag_embed(q) - q.unsqueeze(-1) * q.unsqueeze(-2)) / beta


def logit_gradient(p: Tensor, q: Tensor, v: Tensor, beta: Tensor, lam: Tensor) -> Tensor:
    """d u_t / d b_t(i) of u = (1 - lam) mu + lam F, where p_t = softmax(b_t), q its posterior at beta -> [T, S, C]:

        (1 - lam) p (v - mu) + lam (q - p) / beta

    p, q [T, S, C], v [S, C], beta [C] (zero where lam is: the mean), lam [T, C]. The paper has the second term. It sums
    to zero over i, as a distribution must.
    """
    mean = (p * v).sum(-2, keepdim=True)
    tilt = torch.where(beta > 0, (q - p) / torch.where(beta > 0, beta, 1.0), 0.0)
    lam = lam.unsqueeze(-2)
    return (1 - lam) * p * (v - mean) + lam * tilt


GROUPS = ("value", "prior", "temperature", "gate", "beta", "conditioner", "output")


class MixerRead(NamedTuple):
    """One call of a mixer on one sequence, in float64; everything a closed form of its kernel needs."""

    tokens: Tensor  # [T, E]: the tokens, and a one where the projections have a bias
    prior: Tensor  # [T, S, C]
    posterior: Tensor  # [T, S, C], at beta
    value: Tensor  # [S, C]
    mean: Tensor  # [T, C]
    free: Tensor  # [T, C], the free energy at beta
    lam: Tensor  # [T, C], 0 without part L, 1 without part T
    gate: Tensor  # [T, C], 1 without part G
    gate_logits: Tensor | None  # [T, C]
    beta: Tensor  # [C], 0 without part L
    out: Tensor  # [J, C], the output projection O
    factors: dict[str, Tensor]  # 1 + eta [T, C] of the columns v, lam, gate: what the conditioner multiplies them by
    heads: int
    shared: int  # heads that read the same values

    @property
    def weights(self) -> Tensor:
        """w_tc(i) = (1 - lam) p + lam q, the gradient of the read in the values [T, S, C]."""
        lam = self.lam.unsqueeze(1)
        return (1 - lam) * self.prior + lam * self.posterior

    @property
    def read(self) -> Tensor:
        """u = (1 - lam) mu + lam F [T, C]."""
        return torch.lerp(self.mean, self.free, self.lam)

    def per_value(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the heads that share values: channels C of all heads -> channels of the values."""
        by_head = x.unflatten(dim, (self.heads // self.shared, self.shared, -1))
        return by_head.sum(dim + 1).flatten(dim, dim + 1)


def read_of(mixer: FreeEnergyMixer, x: Tensor) -> MixerRead:
    """Of x [T, dim], for priors over tokens."""
    with torch.no_grad():
        projected, layout = mixer.prepare(x[None])
        shared = mixer.heads // mixer.kv_heads

        def channels(given: Tensor) -> Tensor:
            """[1, T, heads or kv_heads, D] -> [T, C]"""
            return given[0].double().repeat_interleave(mixer.heads // given.shape[2], 1).flatten(1)

        p = mixer.prior.weights(projected.inputs, layout)[0].double()  # [H, T, S] or [H, T, S, D]
        value = channels(projected.v)
        if p.shape[2] != x.shape[0]:
            raise ValueError(
                f"prior={mixer.prior_name!r} is over pairs of token and channel; allowed is one over tokens"
            )
        p = p if p.dim() == 4 else p.unsqueeze(-1).expand(-1, -1, -1, mixer.widths.value)
        p = p.permute(1, 2, 0, 3).flatten(2)
        beta = mixer.beta_max.double().flatten()
        reads_free = mixer.raw_beta is not None
        ones = torch.ones_like(value)
        lam = ones * reads_free if projected.lam is None else channels(temperature_gate(projected.lam))
        bias = mixer.value_proj.linear.bias is not None
        return MixerRead(
            tokens=torch.cat([x.double(), torch.ones_like(x[:, : int(bias)]).double()], 1),
            prior=p,
            posterior=posterior(p, value, beta),
            value=value,
            mean=free_energy(p, value, 0.0),
            free=free_energy(p, value, beta),
            lam=lam,
            gate=ones if projected.gate is None else channels(outer_gate(projected.gate)),
            gate_logits=None if projected.gate is None else channels(projected.gate),
            beta=beta,
            out=mixer.out_proj.weight.detach().double(),
            factors=_factors(mixer, x, channels),
            heads=mixer.heads,
            shared=shared,
        )


def _factors(mixer: FreeEnergyMixer, x: Tensor, channels: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """1 + eta of the value projection's columns by name, [T, C] each."""
    projection = mixer.value_proj
    if mixer.conditioner is None or projection.modulation is None:
        return {name: torch.ones(x.shape[0], 1, dtype=torch.float64) for name in projection.columns}
    _, layout = mixer.prepare(x[None])
    features, _ = mixer.conditioner(x[None], layout)
    eta = (features @ projection.modulation.T).split(projection.widths, -1)
    named = zip(projection.columns, eta, strict=True)
    return {name: 1 + channels(e.unflatten(-1, (-1, mixer.widths.value))) for name, e in named}


def kernel(jacobian: Tensor) -> Tensor:
    """[T, J, ...] -> K [T, J, T, J], the inner products of the rows."""
    rows = jacobian.flatten(2)
    return torch.einsum("tja,sia->tjsi", rows, rows)


def value_kernel(r: MixerRead) -> Tensor:
    """K^(V) = sum_c O_jc O_j'c g_tc g_sc sum_{i, r} w_tc(i) w_sc(r) < h_i, h_r > -> [T, J, T, J].

    h_i is the token times 1 + eta_ic of the conditioner; where heads share values the sum is over these.
    """
    reach = torch.einsum("tsc,sc,se->tce", r.weights, r.factors["v"].expand_as(r.value), r.tokens)
    return kernel(r.per_value(torch.einsum("jc,tc,tce->tjce", r.out, r.gate, reach), 2))


def temperature_kernel(r: MixerRead, odds: Tensor | None = None) -> Tensor:
    """K^(lam) = sum_c O_jc O_j'c a_tc a_sc ((1 + eta_tc) (1 + eta_sc) < h_t, h_s > + 1 / odds_c^2),

    a = g (F - mu) lam (1 - lam); the last term is that of odds [H, D], which only a mixer with start="prior" has.
    """
    a = torch.einsum("jc,tc->tjc", r.out, r.gate * (r.free - r.mean) * r.lam * (1 - r.lam))
    of_map = kernel(torch.einsum("tjc,tc,te->tjce", a, r.factors["lam"].expand_as(r.lam), r.tokens))
    return of_map if odds is None else of_map + kernel(a / (odds.detach().double().abs() + LEAST_ODDS).flatten())


def gate_kernel(r: MixerRead) -> Tensor:
    """K^(g) = < h_t, h_s > sum_c' G_tjc' G_sj'c',  G_tjc' = (1 + eta_tc') sum_c O_jc u_tc d g_tc / d b_tc'.

    g = softplus(b) / rms over the D channels of a head,
    d g_c / d b_c' = sigmoid(b_c') / rms (1[c = c'] - g_c g_c' / D).
    """
    if r.gate_logits is None:
        raise ValueError("this mixer has no outer gate (part G)")
    logits, gate = (x.unflatten(1, (r.heads, -1)) for x in (r.gate_logits, r.gate))
    width = gate.shape[-1]
    rms = (nn.functional.softplus(logits).square().mean(-1, keepdim=True) + EPS).sqrt()
    weighted = torch.einsum("jhd,thd->tjhd", r.out.unflatten(1, (r.heads, -1)), r.read.unflatten(1, (r.heads, -1)))
    along = (weighted * gate[:, None]).sum(-1, keepdim=True) * gate[:, None] / width
    slopes = (weighted - along) * (logits.sigmoid() / rms)[:, None]
    return kernel(torch.einsum("tjc,tc,te->tjce", slopes.flatten(2), r.factors["gate"].expand_as(r.gate), r.tokens))


def beta_kernel(r: MixerRead, raw_beta: Tensor) -> Tensor:
    """K^(beta), of x in beta_max = softplus(x + 1.8): d u / d x = lam KL(q || p) / beta^2 sigmoid(x + 1.8)."""
    slope = (raw_beta.detach().double() + 1.8).sigmoid().repeat_interleave(r.shared, 0).flatten()
    slope = r.lam * kl_divergence(r.posterior, r.prior) / r.beta.square() * slope
    return kernel(r.per_value(torch.einsum("jc,tc->tjc", r.out, r.gate * slope), 2))


def output_kernel(r: MixerRead, bias: bool = True) -> Tensor:
    """K^(O) = 1[j = j'] (< o_t, o_s > + 1),  o = g u; the 1 is the bias's."""
    o = r.gate * r.read
    same = torch.eye(len(r.out), dtype=o.dtype)
    return torch.einsum("ts,ji->tjsi", o @ o.T + float(bias), same)


def prior_kernel(mixer: FreeEnergyMixer, x: Tensor) -> Tensor:
    """K^(QK), of whatever makes the prior, which must be normalized; b = log p and d u / d b is `logit_gradient`:

    d y_tj / d theta = sum_c O_jc g_tc sum_i (d u_tc / d b_t(i)) (d b_t(i) / d theta)
    """
    r = read_of(mixer, x)
    projected, layout = mixer.prepare(x[None])
    p = mixer.prior.weights(projected.inputs, layout)[0]
    p = p if p.dim() == 4 else p.unsqueeze(-1).expand(-1, -1, -1, mixer.widths.value)
    logits = torch.where(p > 0, p, 1.0).log().permute(1, 2, 0, 3).flatten(2)  # [T, S, C]
    push = torch.einsum("jc,tc,tsc->tjsc", r.out, r.gate, logit_gradient(r.prior, r.posterior, r.value, r.beta, r.lam))
    owned = [parameter for name, parameter in mixer.named_parameters() if group_of(name) == "prior"]
    rows = []
    for t in range(push.shape[0]):
        for j in range(push.shape[1]):
            found = torch.autograd.grad((push[t, j] * logits[t]).sum(), owned, retain_graph=True, allow_unused=True)
            rows.append(torch.cat([torch.zeros(0), *(g.flatten() for g in found if g is not None)]))
    return kernel(torch.stack(rows).unflatten(0, push.shape[:2]))


def group_of(name: str) -> str:
    """The group of a mixer's parameter by its name. Rows of value_proj are of several groups: `tangent_kernels`."""
    kinds = {
        "out_proj": "output",
        "conditioner": "conditioner",
        "raw_beta": "beta",
        "lam_odds": "temperature",
        "value_proj": "value",
        "prior_proj": "prior",
        "prior": "prior",
    }
    return "conditioner" if name.endswith("modulation") else kinds[name.split(".")[0]]


def jacobians(call: Callable[[], Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """d y / d parameter of call() -> y [T, J], by automatic differentiation: {name: [T, J, *shape]}."""
    y = call()
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for entry in y.flatten():
        found = torch.autograd.grad(entry, [*parameters.values()], retain_graph=True, allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(row).unflatten(0, y.shape) for name, row in rows.items()}


def tangent_kernels(mixer: FreeEnergyMixer, x: Tensor) -> dict[str, Tensor]:
    """{group: K [T, J, T, J]} by automatic differentiation of the mixer itself; their sum is the whole kernel."""
    names = {"v": "value", "lam": "temperature", "gate": "gate"}
    columns, widths = mixer.value_proj.columns, mixer.value_proj.widths
    kernels: dict[str, Tensor] = {}
    for name, jacobian in jacobians(lambda: mixer(x[None])[0], dict(mixer.named_parameters())).items():
        pieces = [(group_of(name), jacobian)]
        if pieces[0][0] == "value":
            pieces = [(names[c], part) for c, part in zip(columns, jacobian.split(widths, 2), strict=True)]
        for group, part in pieces:
            kernels[group] = kernels.get(group, torch.tensor(0.0)) + kernel(part)
    return {group: kernels[group] for group in GROUPS if group in kernels}


def through(inner: Tensor, jacobian: Tensor) -> Tensor:
    """What follows the mixer token by token, such as an MLP with Jacobian Phi_t [T, I, J]: Phi_t K(t, s) Phi_s^T
    -> [T, I, T, I]. Of a pre-norm block Phi = 1 + d mlp(norm(y)) / d y, because of the residual."""
    return torch.einsum("tij,tjsk,slk->tisl", jacobian, inner, jacobian)


Gate = Callable[[Tensor, Tensor], Tensor]


def value_paths(
    tokens: Tensor, w_v: Tensor, p: Tensor, beta: Tensor, out: Tensor, lam: Gate, gate: Gate
) -> dict[str, Tensor]:
    """The paths by which W_V [C, E] reaches y where the gates look at the read, lam(mu, F) and g(mu, F) [C] -> [C]:

        direct    O_jc g_tc sum_i w_tc(i) h_i                                             [row c of W_V]
        lam       sum_c O_jc g_tc (F_tc - mu_tc) (dlam_tc/dmu_tc' P_t + dlam_tc/dF_tc' Q_tc')       [c']
        gate      sum_c O_jc u_tc (dg_tc/dmu_tc' P_t + dg_tc/dF_tc' Q_tc')                          [c']

    with P_t = sum_i p_t(i) h_i and Q_tc' = sum_i q_tc'(i) h_i: d y_tj / d W_V [T, J, C, E] for each. K^(V),
    K^(lam <- V) and K^(g) are their kernels; the kernel of their sum has cross terms besides. Of gates that look at the
    token alone the last two are zero.
    """
    v = tokens @ w_v.T
    mean, free, q = free_energy(p, v, 0.0), free_energy(p, v, beta), posterior(p, v, beta)
    lams, gates = (torch.stack([f(*row) for row in zip(mean, free, strict=True)]) for f in (lam, gate))
    weights = effective_weights(p, v, beta, lams)
    of_mean = (p @ tokens).unsqueeze(1)  # d mu_tc / d W_c
    of_free = torch.einsum("tsc,se->tce", q, tokens)  # d F_tc / d W_c

    def by_gate(f: Gate, effect: Tensor) -> Tensor:
        slopes = [torch.func.jacrev(f, argnums=(0, 1))(*row) for row in zip(mean, free, strict=True)]
        in_mean, in_free = (torch.stack(s) for s in zip(*slopes, strict=True))  # [T, C, C']
        effect = torch.einsum("jc,tc->tjc", out, effect)
        return torch.einsum("tjc,tcd,tde->tjde", effect, in_mean, of_mean.expand_as(of_free)) + torch.einsum(
            "tjc,tcd,tde->tjde", effect, in_free, of_free
        )

    return {
        "direct": torch.einsum("jc,tc,tsc,se->tjce", out, gates, weights, tokens),
        "lam": by_gate(lam, gates * (free - mean)),
        "gate": by_gate(gate, torch.lerp(mean, free, lams)),
    }


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
