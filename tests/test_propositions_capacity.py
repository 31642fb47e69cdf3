"""The paper's statements about what a read can and cannot express: assignments, convex hulls, ranks, heads of finitely
many features, and the conditioner's kernel. Where the paper's wording is wrong, the test holds the true statement and
its docstring says what differs."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import generator_of, normal, of_seeds, seeds
from torch.testing import assert_close

from femixer.free_energy import effective_weights, free_energy, posterior
from femixer.theory import linearized_head, minimal_degree, monomial_features

# Theorem (channel-wise assignment capacity over the prior support)


@of_seeds()
def test_every_channel_assignment_is_reached_and_one_head_reaches_one_per_position(seed: int) -> None:
    """All |M|^D patterns of arg-maxima, on the support M of the prior, against |M| for shared weights."""
    generator = generator_of(seed)
    support, channels = [0, 2, 3], 3
    p = torch.zeros(1, 5, dtype=torch.float64)
    p[0, support] = normal(generator, 3).softmax(-1)
    free, synchronized = set(), set()
    for assignment in itertools.product(support, repeat=channels):
        # Random values, raised at the assigned positions until the margin is 1; off the support anything.
        v = normal(generator, 5, channels)
        v[assignment, range(channels)] = v[support].amax(0) + 1.0
        v[[1, 4]] = 100.0
        # From here on p(a) exp(beta margin) exceeds every other weight.
        beta = (p.max() / p[0, list(assignment)]).log() + 0.1
        free.add(tuple(posterior(p, v, beta)[0].argmax(0).tolist()))
        synchronized.add(tuple(effective_weights(p, v, beta, 0.0)[0].argmax(0).tolist()))
    assert free == set(itertools.product(support, repeat=channels))
    assert synchronized == {(p[0].argmax().item(),) * channels}

    every_position = torch.eye(5, dtype=torch.float64)[support] * 0.5 + 0.5 * p
    one_head = effective_weights(every_position, v, beta, 0.0).argmax(1)
    assert {tuple(pattern) for pattern in one_head.tolist()} <= {(i,) * channels for i in support}


# Lemma (the channel-wise maximum) and corollary (selectors)


@of_seeds(st.permutations([3, 5, 7]))
def test_channelwise_maximum_lies_outside_the_convex_hull_when_argmaxes_differ(seed: int, sizes: list[int]) -> None:
    """The sum of the coordinates separates it from every value, hence from every expectation. The free energy, whose
    channels compete separately, reaches it."""
    t, s, d = sizes
    generator = generator_of(seed)
    v = normal(generator, s, d)
    v[0, 0] = v[:, 0].amax() + 1.0
    v[1, 1] = v[:, 1].amax() + 1.0
    maximum = v.amax(0)
    distance = maximum.sum() - v.sum(1).amax()
    assert distance > 0
    p = (3.0 * normal(generator, t, s)).softmax(-1)
    assert ((maximum - p @ v).sum(-1) >= distance - 1e-12).all()
    assert_close(free_energy(p, v, math.inf), maximum.expand(t, d))
    beta = 1e4 * -p.log().amin().item()
    assert_close(free_energy(p, v, beta), maximum.expand(t, d), rtol=0, atol=1.01e-4)


@of_seeds()
def test_channelwise_maximum_is_a_value_when_one_position_attains_all_maxima(seed: int) -> None:
    v = normal(generator_of(seed), 5, 7)
    v[3] = v.amax(0) + 0.1
    assert_close(torch.eye(5, dtype=torch.float64)[3] @ v, v.amax(0))


def test_some_selectors_with_different_indices_lie_inside_the_convex_hull() -> None:
    """The corollary claims that no such selector is an expectation, up to measure zero. The lemma it rests on is about
    the channel-wise maximum only: here the selector that takes channel 0 from position 3 and channel 1 from position 4
    is an interior point of the hull, so that it stays one under every small change of the values."""
    v = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [0.0, 1.0], [0.2, 0.0], [0.3, 0.1]], dtype=torch.float64)
    for change in 0.05 * normal(generator_of(0), 50, 5, 2).clamp(-2, 2):
        moved = v + change
        selector = torch.stack([moved[3, 0], moved[4, 1]])
        corners = torch.cat([moved[:3].T, torch.ones(1, 3, dtype=torch.float64)])
        weights = torch.linalg.solve(corners, torch.cat([selector, torch.ones(1, dtype=torch.float64)]))
        assert (weights > 0.01).all()
        assert_close(weights @ moved[:3], selector)


@of_seeds(st.permutations([3, 5, 7]))
def test_channel_by_token_weights_have_rank_one_for_a_head_and_full_rank_for_the_posterior(
    seed: int, sizes: list[int]
) -> None:
    t, s, d = sizes
    generator = generator_of(seed)
    p, v = normal(generator, t, s).softmax(-1), normal(generator, s, d)
    head = effective_weights(p, v, 2.0, 0.0)
    assert_close(head, p.unsqueeze(-1).expand(t, s, d))
    assert torch.linalg.matrix_rank(head).tolist() == [1] * t
    assert torch.linalg.matrix_rank(posterior(p, v, 2.0)).tolist() == [min(s, d)] * t


# Proposition (the conditioner's kernel is rank one in time)


@of_seeds()
def test_conditioner_kernel_is_rank_one_in_time_per_channel(seed: int) -> None:
    """K[t, i] = exp(-sum of s over i+1..t) = f_t / f_i for i <= t, so every 2 x 2 minor inside the causal triangle is 0
    and one number per channel carries the past. (The whole triangular matrix has full rank.)"""
    time, channels = 7, 3
    generator = generator_of(seed)
    decay = torch.nn.functional.softplus(normal(generator, time, channels))
    kernel = torch.zeros(time, time, channels, dtype=torch.float64)
    for t in range(time):
        for i in range(t + 1):
            kernel[t, i] = (-decay[i + 1 : t + 1].sum(0)).exp()
    envelope = (-decay.cumsum(0)).exp()
    for t, i in itertools.product(range(time), repeat=2):
        if i <= t:
            assert_close(kernel[t, i], envelope[t] / envelope[i])
    for i, j, t, u in itertools.combinations(range(time), 4):
        assert_close(kernel[t, i] * kernel[u, j], kernel[t, j] * kernel[u, i])
    assert torch.linalg.matrix_rank(kernel[..., 0]).item() == time

    u = normal(generator, time, channels)
    state, streamed = torch.zeros(channels, dtype=torch.float64), []
    for t in range(time):
        state = (-decay[t]).exp() * state + u[t]
        streamed.append(state)
    assert_close(torch.stack(streamed), torch.einsum("tic,ic->tc", kernel, u))


# Proposition (finite-feature linearization of a softmax head)


@pytest.mark.parametrize(
    ("radius", "epsilon", "degree"),
    [(5, 1e-4, 19), (5, 1e-6, 22), (5, 1e-8, 25), (10, 1e-4, 33), (10, 1e-6, 36), (10, 1e-8, 40)],
)
def test_minimal_degrees_of_the_table(radius: int, epsilon: float, degree: int) -> None:
    """The table is right. Its remark that every entry meets eps e^R <= 1/2 is not: R = 10, eps = 1e-4 gives 2.2."""
    assert minimal_degree(radius, epsilon) == degree
    assert (epsilon * math.exp(radius) <= 0.5) == ((radius, epsilon) != (10, 1e-4))


def test_minimal_degree_grows_at_most_like_radius_plus_logarithm() -> None:
    """N = O(R + log 1/eps). The paper writes Theta, but for a fixed R the degree grows more slowly than log 1/eps."""
    for radius, exponent in itertools.product((0.5, 1.0, 5.0, 10.0, 30.0), (1, 4, 16, 64)):
        assert minimal_degree(radius, 10.0**-exponent) <= math.e**2 * radius + exponent * math.log(10)
    per_digit = [minimal_degree(1.0, 10.0**-exponent) / exponent for exponent in (4, 16, 64, 256)]
    assert per_digit == sorted(per_digit, reverse=True)
    assert per_digit[-1] < 0.5 * per_digit[0]


@settings(max_examples=10, deadline=None)
@given(seeds, st.sampled_from([(1, 5.0), (2, 5.0), (3, 2.0), (1, 10.0)]), st.sampled_from([1e-6, 1e-8]))
def test_softmax_head_is_approximated_by_finitely_many_features(
    seed: int, width_and_radius: tuple[int, float], epsilon: float
) -> None:
    """Kernel error at most eps, read error at most 4 V e^R eps at every t, from binomial(N + d, d) features."""
    width, radius = width_and_radius
    generator = generator_of(seed)
    time, channels = 11, 3
    q, k, v = (normal(generator, time, n) for n in (width, width, channels))
    q = q * (radius / (q @ k.T).abs().amax())
    degree = minimal_degree(radius, epsilon)
    features_q, features_k = monomial_features(q, degree), monomial_features(k, degree)
    assert features_q.shape[-1] == math.comb(degree + width, width)

    kernel = (q @ k.T).exp()
    rounding = 1e-14 * math.exp(radius)
    assert (kernel - features_q @ features_k.T).abs().amax() <= epsilon + rounding

    assert epsilon * math.exp(radius) <= 0.5
    exact = (q @ k.T).masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf).softmax(-1) @ v
    linearized = linearized_head(q, k, v, degree)
    bound = 4 * v.norm(dim=-1).amax() * math.exp(radius) * epsilon
    assert ((exact - linearized).norm(dim=-1) <= bound).all()
