"""The paper's statements about temperatures and budgets (theorem fem-main, appendices "Linearized Temperature Learning"
and "Two-level Gated FEM"), in float64 on random problems. Where the paper's wording is wrong, the test holds the true
statement and its docstring says what differs."""

import math

import torch
from hypothesis import strategies as st
from problems import Problem, normal, of_problems
from torch import Tensor
from torch.testing import assert_close

from femixer.free_energy import (
    effective_weights,
    free_energy,
    hidden_temperature,
    kl_divergence,
    posterior,
    posterior_mean,
    temperature_for_budget,
)


def interpolated(problem: Problem, lam: float | Tensor) -> Tensor:
    """(1 - lam) mu + lam F(beta_max)."""
    p, v, beta_max, _, _ = problem
    return (1 - lam) * free_energy(p, v, 0.0) + lam * free_energy(p, v, beta_max)


# Linearized temperature learning


@of_problems(coldest=10.0)
def test_hidden_temperature_exists_and_is_unique(problem: Problem) -> None:
    """A solution inside the range, and F lies strictly on either side of the target to the left and right of it."""
    p, v, beta_max, lam, _ = problem
    hidden = hidden_temperature(p, v, beta_max, lam)
    target = interpolated(problem, lam)
    assert ((hidden > 0) & (hidden < beta_max)).all()
    assert_close(free_energy(p, v, hidden), target, rtol=1e-11, atol=1e-13)
    assert (free_energy(p, v, 0.99 * hidden) < target).all()
    assert (free_energy(p, v, 1.01 * hidden) > target).all()


@of_problems(coldest=10.0)
def test_hidden_temperature_strictly_increases_with_lambda_from_zero_to_beta_max(problem: Problem) -> None:
    p, v, beta_max, _, _ = problem
    path = torch.stack([hidden_temperature(p, v, beta_max, lam) for lam in (0.0, 1e-3, 0.2, 0.5, 0.9, 1 - 1e-3, 1.0)])
    assert (path.diff(dim=0) > 0).all()
    assert_close(path[0], torch.zeros_like(path[0]), rtol=0, atol=0)
    assert_close(path[-1], beta_max.expand_as(path[-1]), rtol=0, atol=0)


@of_problems(coldest=10.0)
def test_lambda_is_the_fraction_of_the_reverse_kl_improvement(problem: Problem) -> None:
    """KL(p || q(beta*)) / beta* = lam KL(p || q(beta_max)) / beta_max."""
    p, v, beta_max, lam, _ = problem
    hidden = hidden_temperature(p, v, beta_max, lam)
    realized = kl_divergence(p, posterior(p, v, hidden)) / hidden
    achievable = kl_divergence(p, posterior(p, v, beta_max)) / beta_max
    assert_close(realized, lam * achievable, rtol=1e-7, atol=1e-11)


@of_problems(coldest=10.0)
def test_lambda_reparameterizes_the_temperature(problem: Problem) -> None:
    """d read / d lam = F'(beta*) d beta* / d lam, with F'(beta*) > 0."""
    p, v, beta_max, lam, _ = problem
    lam = lam.clone().requires_grad_()
    hidden = hidden_temperature(p, v, beta_max, lam)
    (speed,) = torch.autograd.grad(hidden.sum(), lam)
    beta = hidden.detach().requires_grad_()
    (slope,) = torch.autograd.grad(free_energy(p, v, beta).sum(), beta)
    assert (slope > 0).all()
    assert (speed > 0).all()
    (direct,) = torch.autograd.grad(interpolated(problem, lam).sum(), lam)
    assert_close(slope * speed, direct, rtol=1e-9, atol=1e-12)


@of_problems(coldest=10.0)
def test_containment_lambda_zero_is_the_reweighted_mean(problem: Problem) -> None:
    """g * read at lam = 0 is sum_s p_s (g * v_s)."""
    p, v, beta_max, _, generator = problem
    gate = normal(generator, p.shape[0], v.shape[1]).exp()
    reweighted = (p.unsqueeze(-1) * (gate.unsqueeze(1) * v.unsqueeze(0))).sum(1)
    assert_close(gate * interpolated(problem, 0.0), reweighted)
    weights = effective_weights(p, v, beta_max, 0.0)
    assert_close(gate * (weights * v).sum(1), reweighted)


@of_problems(st.floats(0.0, 1.0), coldest=10.0)
def test_containment_the_gate_is_a_monotone_convex_aggregator(problem: Problem, share: float) -> None:
    """Increasing in lam, and increasing and convex in v. It ends at F(beta_max), which is below the maximum that the
    paper names as its other end."""
    v, lam, generator = problem.v, problem.lam, problem.generator
    low, high, top = interpolated(problem, 0.5 * lam), interpolated(problem, lam), interpolated(problem, 1.0)
    assert (low < high).all()
    assert (high < top).all()
    assert (top < v.amax(0)).all()
    raised = problem._replace(v=v + normal(generator, *v.shape).exp())
    assert (interpolated(raised, lam) > high).all()
    other = problem._replace(v=v + normal(generator, *v.shape))
    mixed = problem._replace(v=share * v + (1 - share) * other.v)
    ends = share * high + (1 - share) * interpolated(other, lam)
    assert (interpolated(mixed, lam) <= ends + 1e-10).all()


# Equivalence of budget and penalty


@of_problems(coldest=10.0)
def test_penalized_optimum_solves_the_budget_problem(problem: Problem) -> None:
    """No distribution within the budget KL(q_beta || p) has a larger expectation than q_beta."""
    p, v, beta, _, generator = problem
    optimum = posterior(p, v, beta)
    budget = kl_divergence(optimum, p)
    rival = (3.0 * normal(generator, *optimum.shape)).softmax(1)
    prior = p.unsqueeze(-1).expand_as(rival)
    # KL grows along the segment from p to the rival, so bisection finds where it spends the budget.
    share, step = torch.zeros_like(budget), 0.5
    for _ in range(40):
        bolder = share + step
        affordable = kl_divergence(torch.lerp(prior, rival, bolder.unsqueeze(1)), p) <= budget
        share, step = torch.where(affordable, bolder, share), step / 2
    feasible = torch.lerp(prior, rival, share.unsqueeze(1))
    assert (kl_divergence(feasible, p) <= budget).all()
    assert ((feasible * v).sum(1) <= posterior_mean(p, v, beta) + 1e-10 * v.abs().amax()).all()


@of_problems(coldest=10.0)
def test_temperature_for_budget_inverts_the_kl_of_the_posterior(problem: Problem) -> None:
    p, v, beta, _, _ = problem
    kl = kl_divergence(posterior(p, v, beta), p)
    most = -p[:, v.argmax(0)].log()
    # Close to saturation KL no longer tells temperatures apart.
    clear = kl < 0.99 * most
    found = temperature_for_budget(p, v, kl)
    assert_close(found[clear], beta.expand_as(kl)[clear], rtol=1e-7, atol=0)
    assert_close(kl_divergence(posterior(p, v, found), p), kl, rtol=1e-9, atol=1e-13)


@of_problems(coldest=10.0)
def test_temperature_strictly_increases_with_the_budget_until_the_maximum_is_affordable(problem: Problem) -> None:
    """The paper promises a finite temperature for every budget; from -log p(i*) on there is none."""
    p, v, _, _, _ = problem
    most = -p[:, v.argmax(0)].log()
    path = torch.stack([temperature_for_budget(p, v, share * most) for share in (0.0, 1e-6, 0.1, 0.5, 0.9, 0.999)])
    assert (path.diff(dim=0) > 0).all()
    assert path.isfinite().all()
    assert (path[0] == 0).all()
    assert temperature_for_budget(p, v, 1.001 * most).isinf().all()


def test_budget_problem_has_many_solutions_when_tied_maxima_are_affordable() -> None:
    """The paper's uniqueness of q* needs a budget below -log p(argmax) or a single maximum."""
    p = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    v = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    first, both = (torch.tensor(q, dtype=torch.float64).view(1, 3, 1) for q in ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0]))
    for q in (first, both):
        assert (q * v).sum().item() == v.max().item()
        assert kl_divergence(q, p).item() < 2.0
    assert temperature_for_budget(p, v, 2.0).item() == math.inf
    assert_close(posterior(p, v, math.inf), both)


@of_problems(coldest=10.0)
def test_expectation_under_the_posterior_exceeds_the_free_energy_by_kl_over_beta(problem: Problem) -> None:
    """Theorem fem-main says E_q*[v] = F(beta*). In truth E_q[v] = F + KL(q || p) / beta, which is larger."""
    p, v, beta, _, _ = problem
    expectation, read = posterior_mean(p, v, beta), free_energy(p, v, beta)
    assert_close(expectation, (posterior(p, v, beta) * v).sum(1))
    assert_close(expectation, read + kl_divergence(posterior(p, v, beta), p) / beta, rtol=1e-9, atol=1e-11)
    assert (expectation > read).all()
