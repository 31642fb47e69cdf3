"""The paper's statements about the free energy as a function of temperature, values and prior (appendix "Theoretical
properties of FEM"), each a property checked in float64 on random problems. Where the paper's wording is wrong, the test
holds the true statement and its docstring says what differs.

Temperature learning and budgets: test_propositions_temperature.py. Capacity and heads: test_propositions_capacity.py.
"""

import math

import torch
from hypothesis import strategies as st
from problems import Problem, normal, of_problems
from torch import Tensor
from torch.autograd.functional import hessian
from torch.testing import assert_close

from femixer.free_energy import free_energy, kl_divergence, posterior, posterior_mean


def distribution(generator: torch.Generator, *shape: int) -> Tensor:
    """A random distribution over the axis before the last."""
    return (2.0 * normal(generator, *shape)).softmax(-2)


def covariance(q: Tensor) -> Tensor:
    """J(q) = Diag(q) - q q^T of one distribution [S]."""
    return torch.diag(q) - torch.outer(q, q)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax()


# Lemma (Donsker-Varadhan variational principle)


@of_problems()
def test_donsker_varadhan_the_posterior_is_the_unique_optimum(problem: Problem) -> None:
    """Every q falls short of F by exactly KL(q || posterior) / beta, which vanishes only at the posterior."""
    p, v, beta, _, generator = problem

    def objective(q: Tensor) -> Tensor:
        return (q * v).sum(-2) - kl_divergence(q, p) / beta

    optimum, read = posterior(p, v, beta), free_energy(p, v, beta)
    assert_close(objective(optimum), read)
    other = distribution(generator, *optimum.shape)
    shortfall = kl_divergence(other, optimum) / beta
    assert (shortfall > 0).all()
    assert_close(read - objective(other), shortfall, rtol=1e-9, atol=1e-9)


# Proposition (expectation baseline and monotonicity)


@of_problems()
def test_free_energy_is_the_mean_plus_reverse_kl_over_beta(problem: Problem) -> None:
    p, v, beta, *_ = problem
    improvement = kl_divergence(p, posterior(p, v, beta)) / beta
    assert (improvement >= 0).all()
    assert_close(free_energy(p, v, beta), p @ v + improvement, rtol=1e-9, atol=1e-12)


@of_problems()
def test_derivative_in_beta_is_kl_over_beta_squared(problem: Problem) -> None:
    p, v, *_ = problem
    beta = problem.beta.expand(p.shape[0], -1).clone().requires_grad_()
    (derivative,) = torch.autograd.grad(free_energy(p, v, beta).sum(), beta)
    expected = kl_divergence(posterior(p, v, beta), p) / beta.square()
    assert (derivative > 0).all()
    assert_close(derivative, expected.detach(), rtol=1e-7, atol=1e-10)


@of_problems()
def test_free_energy_strictly_increases_in_beta_unless_values_are_constant(problem: Problem) -> None:
    p, v, *_ = problem
    v = v / v.abs().amax()
    reads = torch.stack([free_energy(p, v, beta) for beta in (0.0, 0.01, 0.1, 1.0, 10.0, 100.0)])
    assert (reads.diff(dim=0) > 0).all()
    constant = v[:1].expand_as(v)
    assert_close(free_energy(p, constant, 100.0), free_energy(p, constant, 0.0), rtol=0, atol=0)


@of_problems()
def test_small_beta_expansion_is_mean_plus_half_beta_variance(problem: Problem) -> None:
    """The remainder is beta^2 times a sixth of the third cumulant, up to a fourth-order term."""
    p, v, *_ = problem
    v = v / largest(v)
    mean = p @ v
    centered = v.unsqueeze(0) - mean.unsqueeze(1)
    variance, third = ((p.unsqueeze(-1) * centered**k).sum(1) for k in (2, 3))
    for beta in (1e-3, 1e-2):
        remainder = free_energy(p, v, beta) - mean - beta / 2 * variance
        assert_close(remainder, beta**2 / 6 * third, rtol=0, atol=2 * beta**3 + 1e-15)


# Proposition (local geometry)


@of_problems()
def test_gradient_in_v_is_the_posterior(problem: Problem) -> None:
    p, beta = problem.p, problem.beta
    v = problem.v.clone().requires_grad_()
    q = posterior(p, v, beta).detach()
    read = free_energy(p, v, beta)
    for t in range(p.shape[0]):
        (gradient,) = torch.autograd.grad(read[t].sum(), v, retain_graph=True)
        assert_close(gradient, q[t], rtol=1e-9, atol=1e-12)
    assert_close(q.abs().sum(1), torch.ones_like(read), rtol=1e-12, atol=0)
    assert (q.square().sum(1) <= 1 + 1e-12).all()


@of_problems()
def test_hessian_in_v_is_beta_times_covariance_and_at_most_half_beta(problem: Problem) -> None:
    p, v, beta, *_ = problem
    row = p[:1]
    for d in range(2):
        curvature = hessian(lambda x, d=d: free_energy(row, x.unsqueeze(-1), beta[d]).squeeze(), v[:, d])
        q = posterior(row, v, beta)[0, :, d]
        assert_close(curvature, beta[d] * covariance(q), rtol=1e-8, atol=1e-10)
        eigenvalues = torch.linalg.eigvalsh(curvature)
        assert eigenvalues[0] >= -1e-10 * beta[d]
        assert eigenvalues[-1] <= beta[d] / 2 * (1 + 1e-10)


def test_half_beta_bound_is_tight_for_two_equal_positions() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    curvature = hessian(lambda x: free_energy(p, x.unsqueeze(-1), 3.0).squeeze(), torch.ones(5, dtype=torch.float64))
    assert_close(torch.linalg.eigvalsh(curvature).tolist(), [0.0, 0.0, 0.0, 0.0, 1.5])


# Proposition (range, concentration and finite-beta guarantees)


@of_problems()
def test_range_and_concentration_bounds(problem: Problem) -> None:
    p, v, beta, *_ = problem
    q, read = posterior(p, v, beta), free_energy(p, v, beta)
    (best, second), (index, _) = v.topk(2, dim=0)
    chosen_p = p[:, index]
    chosen_q = q.gather(1, index.expand(p.shape[0], 1, -1)).squeeze(1)
    slack = 1e-12 * largest(v)
    assert (p @ v <= read + slack).all()
    assert (best + chosen_p.log() / beta <= read + slack).all()
    assert (read <= best + slack).all()
    bound = (1 - chosen_p) / chosen_p * (-beta * (best - second)).exp()
    assert (1 - chosen_q <= bound + 1e-12).all()


def test_concentration_needs_the_prior_odds() -> None:
    """The appendix on two-level gates claims 1 - q(i*) <= exp(-beta margin) from some beta on that depends on the
    margin only: an unlikely maximum violates it at every beta."""
    p = torch.tensor([[0.01, 0.99]], dtype=torch.float64)
    v = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    for beta in (1.0, 5.0, 20.0):
        assert 1 - posterior(p, v, beta)[0, 0, 0] > math.exp(-beta)


@of_problems()
def test_posterior_concentrates_exponentially_but_the_free_energy_only_like_one_over_beta(problem: Problem) -> None:
    """The paper says that F reaches the maximum exponentially. The posterior and its mean do; F lags behind by
    -log p(i*) / beta."""
    p, v, *_ = problem
    (best, second), (index, _) = v.topk(2, dim=0)
    lag = -p[:, index].log()
    beta = (40.0 + lag) / (best - second)
    assert_close(beta * (best - free_energy(p, v, beta)), lag, rtol=1e-6, atol=1e-9)
    assert_close(beta * (best - posterior_mean(p, v, beta)), torch.zeros_like(lag), rtol=0, atol=1e-9)


# Proposition (mask preservation; shift and scale; prior sensitivity)


@of_problems()
def test_masking_is_preserved(problem: Problem) -> None:
    p, v, beta, *_ = problem
    masked = p.clone()
    masked[:, 1] = 0.0
    masked = masked / masked.sum(-1, keepdim=True)
    q = posterior(masked, v, beta)
    assert (q[:, 1] == 0).all()
    assert_close(q.sum(1), torch.ones_like(q[:, 0]))


@of_problems()
def test_restricting_the_support_lowers_the_variational_optimum(problem: Problem) -> None:
    """The maximum over q on fewer positions, against the same p, is smaller; it is the free energy of p with the other
    entries set to zero and *not* renormalized. After renormalizing it need not be smaller: see the next test."""
    p, v, beta, _, generator = problem
    restricted = p.clone()
    restricted[:, 1] = 0.0
    optimum = free_energy(restricted, v, beta)
    assert (optimum <= free_energy(p, v, beta) + 1e-12 * largest(v)).all()
    inside = posterior(restricted, v, beta)
    assert_close((inside * v).sum(1) - kl_divergence(inside, p) / beta, optimum, rtol=1e-9, atol=1e-10)
    other = distribution(generator, *inside.shape) * (restricted > 0).unsqueeze(-1)
    other = other / other.sum(1, keepdim=True)
    assert ((other * v).sum(1) - kl_divergence(other, p) / beta <= optimum + 1e-10 * largest(v)).all()


def test_renormalizing_after_a_restriction_can_raise_the_read() -> None:
    p, only_second = torch.tensor([[[0.5, 0.5]], [[0.0, 0.5]]], dtype=torch.float64)
    v = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    full = free_energy(p, v, 1.0).item()
    assert free_energy(only_second, v, 1.0).item() < full < free_energy(2 * only_second, v, 1.0).item()


@of_problems(st.floats(-5.0, 5.0), st.floats(0.1, 5.0))
def test_shift_and_scale_laws(problem: Problem, shift: float, scale: float) -> None:
    p, v, beta, *_ = problem
    assert_close(free_energy(p, v + shift, beta), shift + free_energy(p, v, beta))
    assert_close(free_energy(p, scale * v, beta), scale * free_energy(p, v, scale * beta))
    assert_close(posterior(p, scale * v + shift, beta), posterior(p, v, scale * beta), rtol=1e-7, atol=1e-10)


@of_problems(st.floats(0.0, 1.0))
def test_free_energy_is_concave_in_p(problem: Problem, share: float) -> None:
    p, v, beta, _, generator = problem
    other = distribution(generator, p.shape[1], p.shape[0]).T
    mixed = free_energy(share * p + (1 - share) * other, v, beta)
    assert (mixed >= share * free_energy(p, v, beta) + (1 - share) * free_energy(other, v, beta) - 1e-10).all()


@of_problems()
def test_gradient_and_hessian_in_probabilities(problem: Problem) -> None:
    p, v, beta, *_ = problem
    beta, v = beta[0], (v[:, :1] / largest(v))
    tilt = (beta * v[:, 0]).exp() / (p[0] @ (beta * v[:, 0]).exp())
    row = p[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(free_energy(row.unsqueeze(0), v, beta).squeeze(), row)
    assert_close(gradient, tilt / beta, rtol=1e-9, atol=1e-12)
    curvature = hessian(lambda x: free_energy(x.unsqueeze(0), v, beta).squeeze(), p[0])
    assert_close(curvature, -torch.outer(tilt, tilt) / beta, rtol=1e-7, atol=1e-9)


@of_problems(st.floats(0.0, 1.0))
def test_free_energy_is_convex_in_unnormalized_log_weights(problem: Problem, share: float) -> None:
    p, v, beta, _, generator = problem
    first, second = (normal(generator, *p.shape) for _ in range(2))
    mixed = free_energy((share * first + (1 - share) * second).exp(), v, beta)
    ends = share * free_energy(first.exp(), v, beta) + (1 - share) * free_energy(second.exp(), v, beta)
    assert (mixed <= ends + 1e-10 * (1 + largest(ends))).all()

    logits = first.requires_grad_()
    read = free_energy(logits.exp(), v, beta)
    q = posterior(logits.exp(), v, beta).detach()
    (gradient,) = torch.autograd.grad(read.sum(), logits)
    assert_close(gradient, (q / beta).sum(-1), rtol=1e-9, atol=1e-12)


@of_problems()
def test_gradient_in_normalized_logits_is_posterior_minus_prior_over_beta(problem: Problem) -> None:
    p, v, beta, *_ = problem
    logits = p.log().requires_grad_()
    read = free_energy(logits.softmax(-1), v, beta)
    expected = ((posterior(p, v, beta) - p.unsqueeze(-1)) / beta).sum(-1)
    assert_close(torch.autograd.grad(read.sum(), logits)[0], expected, rtol=1e-8, atol=1e-9)


@of_problems()
def test_hessian_in_normalized_logits_is_a_difference_of_two_covariances(problem: Problem) -> None:
    p, v, beta, *_ = problem
    logits, v = p[0].log(), v[:, :1]
    curvature = hessian(lambda x: free_energy(x.softmax(-1).unsqueeze(0), v, beta[0]).squeeze(), logits)
    q = posterior(p[:1], v, beta[0])[0, :, 0]
    assert_close(curvature, (covariance(q) - covariance(p[0])) / beta[0], rtol=1e-7, atol=1e-8)


def test_hessian_in_normalized_logits_can_be_indefinite() -> None:
    """Three positions, the first two certain to the posterior alone and to the prior alone: q = (1/2, 1/2, 0) nearly,
    p = (0.05, 0.05, 0.9), so one direction gains variance and another loses it."""
    p = torch.tensor([0.05, 0.05, 0.9], dtype=torch.float64)
    v = torch.tensor([[9.0], [9.0], [0.0]], dtype=torch.float64)
    curvature = hessian(lambda x: free_energy(x.softmax(-1).unsqueeze(0), v, 1.0).squeeze(), p.log())
    eigenvalues = torch.linalg.eigvalsh(curvature)
    assert eigenvalues[0] < -0.1
    assert eigenvalues[-1] > 0.1
