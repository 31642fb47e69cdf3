"""Behaviour of the functions of femixer.free_energy: values, limits, masks, shapes, precision, gradients, errors."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from femixer.free_energy import (
    effective_weights,
    free_energy,
    hidden_temperature,
    kl_divergence,
    posterior,
    posterior_mean,
    temperature_for_budget,
)

T, S, D = 3, 5, 7
READS = {
    "free_energy": lambda p, v: free_energy(p, v, 1.3),
    "posterior": lambda p, v: posterior(p, v, 1.3),
    "posterior_mean": lambda p, v: posterior_mean(p, v, 1.3),
    "hidden_temperature": lambda p, v: hidden_temperature(p, v, 1.3, 0.4),
    "temperature_for_budget": lambda p, v: temperature_for_budget(p, v, 0.01),
    "effective_weights": lambda p, v: effective_weights(p, v, 1.3, 0.4),
}
for_all_reads = pytest.mark.parametrize("read", READS.values(), ids=READS.keys())


def random_prior(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, dim: int = -1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).softmax(dim).to(dtype)


def random_values(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_free_energy(p: Tensor, v: Tensor, beta: float) -> float:
    """The definition for one row, with 60 digits, on the distribution p / sum(p)."""
    with localcontext() as context:
        context.prec = 60
        weights = [Decimal(x) for x in p.tolist()]
        total = sum(weights)
        terms = [w / total * (Decimal(beta) * Decimal(x)).exp() for w, x in zip(weights, v.tolist(), strict=True)]
        return float(sum(terms).ln() / Decimal(beta))


# Two equally likely positions with the values 0 and log 3: exp(beta v) is 1 and 3^beta.
COIN = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
LOG3 = torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64)


def test_hand_worked_numbers() -> None:
    kl_at_one = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    half_log = {x: 0.5 * math.log(x) for x in (3, 4, 5)}
    assert free_energy(COIN, LOG3, 0.0).item() == pytest.approx(half_log[3], rel=1e-14)
    assert free_energy(COIN, LOG3, 1.0).item() == pytest.approx(math.log(2.0), rel=1e-14)
    assert free_energy(COIN, LOG3, 2.0).item() == pytest.approx(half_log[5], rel=1e-14)
    assert posterior(COIN, LOG3, 1.0).flatten().tolist() == pytest.approx([0.25, 0.75], rel=1e-14)
    assert posterior_mean(COIN, LOG3, 2.0).item() == pytest.approx(0.9 * math.log(3.0), rel=1e-14)
    assert effective_weights(COIN, LOG3, 2.0, 0.5).flatten().tolist() == pytest.approx([0.3, 0.7], rel=1e-14)
    assert kl_divergence(posterior(COIN, LOG3, 1.0), COIN).item() == pytest.approx(kl_at_one, rel=1e-13)
    assert temperature_for_budget(COIN, LOG3, kl_at_one).item() == pytest.approx(1.0, rel=1e-13)
    lam = (half_log[4] - half_log[3]) / (half_log[5] - half_log[3])
    assert hidden_temperature(COIN, LOG3, 2.0, lam).item() == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("beta_times_scale", [1e-9, 1e-5, 1e-2, 0.3, 3.0, 40.0, 1e4])
def test_free_energy_equals_the_definition_at_every_range(
    dtype: torch.dtype, scale: float, beta_times_scale: float
) -> None:
    p = random_prior(T, S, dtype=dtype)
    v = scale * random_values(S, D, dtype=dtype)
    beta = beta_times_scale / scale
    computed = free_energy(p, v, beta)
    assert computed.dtype == dtype
    expected = torch.tensor([[exact_free_energy(p[t], v[:, d], beta) for d in range(D)] for t in range(T)], dtype=dtype)
    torch.testing.assert_close(computed, expected, rtol=0, atol=4 * torch.finfo(dtype).eps * scale)


def test_float32_prior_with_tiny_weight_on_the_maximum() -> None:
    """1e-40 is below the smallest normal float32, and the others weigh exp(-1e4) against it."""
    p = torch.tensor([[1e-40, 0.5, 0.5]])
    v = torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    read = free_energy(p, v, 1.0)
    assert read.item() == pytest.approx(1e4 + math.log(1e-40), rel=1e-6)
    read.backward()
    assert v.grad is not None
    assert v.grad.flatten().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("beta", [1e-7, 1e-4, 1e-2])
def test_gain_over_the_mean_survives_a_small_beta(beta: float) -> None:
    """Around a mean of zero, with values -a and a, the gain is log(cosh(beta a)) / beta, with all its digits."""
    a = math.log(3.0) / 2
    gain = free_energy(COIN, LOG3 - LOG3.mean(), beta).item()
    assert gain == pytest.approx(beta * a**2 / 2 - beta**3 * a**4 / 12 + beta**5 * a**6 / 45, rel=1e-12)


def test_free_energy_stays_between_mean_and_maximum_in_float32() -> None:
    p = random_prior(50, T, S, dtype=torch.float32)
    v = random_values(50, S, D, dtype=torch.float32)
    mean, maximum = free_energy(p, v, 0.0), v.amax(-2, keepdim=True).expand(50, T, D)
    for beta in (1e-30, 1e-6, 1e-3, 1.0, 1e2, 1e4, 1e30, math.inf):
        read = free_energy(p, v, beta)
        assert (mean <= read).all()
        assert (read <= maximum).all()


def test_zero_and_nonzero_beta_mix_in_one_tensor() -> None:
    p, v = random_prior(T, S), random_values(S, 3)
    mixed = free_energy(p, v, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(mixed[:, [0, 2]], (p @ v)[:, [0, 2]])
    torch.testing.assert_close(mixed[:, 1], free_energy(p, v, 2.0)[:, 1])
    torch.testing.assert_close(posterior(p, v, 0.0), p.unsqueeze(-1).expand(T, S, 3))
    torch.testing.assert_close(posterior_mean(p, v, 0.0), p @ v)


def test_derivative_in_beta_at_zero_is_half_the_variance() -> None:
    p, v = random_prior(T, S), random_values(S, D)
    beta = torch.zeros(T, D, dtype=torch.float64, requires_grad=True)
    beta_with_others = torch.cat([beta[:, :3], torch.full((T, D - 3), 2.0, dtype=torch.float64)], dim=-1)
    variance = p @ v.square() - (p @ v).square()
    (at_zero,) = torch.autograd.grad(free_energy(p, v, beta).sum(), beta)
    torch.testing.assert_close(at_zero, variance / 2)
    (mixed,) = torch.autograd.grad(free_energy(p, v, beta_with_others).sum(), beta)
    torch.testing.assert_close(mixed[:, :3], variance[:, :3] / 2)


def test_infinite_beta_reads_the_maximum_with_its_ties() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5, 0.0]], dtype=torch.float64)
    v = torch.tensor([[1.0], [1.0], [0.0], [9.0]], dtype=torch.float64, requires_grad=True)
    read = free_energy(p, v, math.inf)
    assert read.item() == 1.0
    assert posterior_mean(p, v, math.inf).item() == 1.0
    torch.testing.assert_close(posterior(p, v, math.inf).flatten().tolist(), [0.4, 0.6, 0.0, 0.0])
    read.backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad.flatten().tolist(), [0.4, 0.6, 0.0, 0.0])
    mixed = free_energy(p, v.expand(4, 2), torch.tensor([math.inf, 0.0], dtype=torch.float64))
    torch.testing.assert_close(mixed.flatten().tolist(), [1.0, 0.5])


@for_all_reads
@pytest.mark.parametrize("poison", [1e30, -1e30, math.inf, -math.inf, math.nan])
def test_value_outside_the_support_changes_nothing(read, poison: float) -> None:
    """Not the result, not the gradients, and nothing is NaN: neither the value nor the gradient at the masked place."""
    logits = torch.randn(T, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[:, 2] = -torch.inf

    def run(masked_value: float) -> tuple[Tensor, Tensor, Tensor]:
        v = random_values(S, D)
        v[2] = masked_value
        p, v = logits.softmax(-1).requires_grad_(), v.requires_grad_()
        result = read(p, v)
        return result, *torch.autograd.grad(result.sin().sum(), (p, v))

    for clean, poisoned in zip(run(0.0), run(poison), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)
    _, p_gradient, v_gradient = run(poison)
    assert (p_gradient[:, 2] == 0).all()
    assert (v_gradient[2] == 0).all()


@for_all_reads
def test_masked_positions_may_as_well_be_absent(read) -> None:
    keep = [0, 1, 3, 4]
    p, v = random_prior(T, S), random_values(S, D)
    p[:, 2] = 0.0
    p = p / p.sum(-1, keepdim=True)
    with_mask, without = read(p, v), read(p[:, keep], v[keep])
    if with_mask.dim() == 3:
        assert (with_mask[:, 2] == 0).all()
        with_mask = with_mask[:, keep]
    torch.testing.assert_close(with_mask, without)


def test_empty_rows_read_zero_with_finite_gradients() -> None:
    p = torch.stack([torch.zeros(S), random_prior(S), torch.zeros(S)]).double().requires_grad_()
    v = random_values(S, D).requires_grad_()
    beta = torch.full((D,), 1.3, dtype=torch.float64, requires_grad=True)
    outputs = [
        free_energy(p, v, beta),
        posterior(p, v, beta),
        posterior_mean(p, v, beta),
        effective_weights(p, v, beta, 0.4),
    ]
    for output in outputs:
        assert (output[[0, 2]] == 0).all()
        assert (output[1] != 0).any()
    temperature = hidden_temperature(p, v, beta, 0.4)
    torch.testing.assert_close(temperature[0], 0.4 * beta)
    loss = sum(output.sin().sum() for output in [*outputs, temperature])
    for gradient in torch.autograd.grad(loss, (p, v, beta)):
        assert gradient.isfinite().all()
    assert temperature_for_budget(p, v, 0.1)[0].isinf().all()


def test_weights_that_do_not_sum_to_one_are_taken_literally() -> None:
    weights, v = 0.3 * random_prior(T, S), random_values(S, D)
    torch.testing.assert_close(free_energy(weights, v, 2.0), (weights @ (2.0 * v).exp()).log() / 2.0)
    torch.testing.assert_close(free_energy(weights, v, 0.0), weights @ v)
    torch.testing.assert_close(posterior(weights, v, 2.0), posterior(weights / 0.3, v, 2.0))
    torch.testing.assert_close(effective_weights(weights, v, 2.0, 0.0), weights.unsqueeze(-1).expand(T, S, D))


def test_float32_rounding_of_the_sum_of_p_is_not_divided_by_beta() -> None:
    p, v = random_prior(T, 997, dtype=torch.float32), random_values(997, D, dtype=torch.float32)
    p = p * (1 + 1e-6)
    torch.testing.assert_close(free_energy(p, v, 1e-6), p @ v, rtol=0, atol=1e-5)


def test_gradient_through_a_float32_softmax_has_no_noise_at_tiny_beta() -> None:
    logits, v = random_values(T, S, dtype=torch.float32).requires_grad_(), random_values(S, D, dtype=torch.float32)
    gradients = [torch.autograd.grad(free_energy(logits.softmax(-1), v, b).sum(), logits)[0] for b in (0.0, 1e-7)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@for_all_reads
def test_leading_dimensions_broadcast(read) -> None:
    p, v = random_prior(2, 1, T, S), random_values(1, 11, S, D)
    together = read(p, v)
    assert together.shape[:2] == (2, 11)
    for a in range(2):
        for b in (0, 10):
            torch.testing.assert_close(together[a, b], read(p[a, 0], v[0, b]))
    torch.testing.assert_close(read(p[0, 0], v[0]), together[0])


@for_all_reads
def test_prior_per_channel(read) -> None:
    p, v = random_prior(2, T, S, D, dim=-2), random_values(2, S, D)
    together = read(p, v)
    for d in range(D):
        torch.testing.assert_close(together[..., d], read(p[..., d], v[..., d : d + 1])[..., 0])
    shared = random_prior(2, T, S)
    torch.testing.assert_close(read(shared.unsqueeze(-1).expand(2, T, S, D), v), read(shared, v))


@for_all_reads
def test_no_rows_one_position_and_one_channel(read) -> None:
    assert read(random_prior(0, S), random_values(S, D)).shape[0] == 0
    assert read(random_prior(T, S), random_values(S, 1)).shape[-1] == 1
    assert read(torch.ones(T, 1), torch.ones(1, D)).shape[-1] == D


def test_single_position_is_read_at_every_temperature() -> None:
    v = random_values(1, D)
    for beta in (0.0, 1.0, 1e6, math.inf):
        torch.testing.assert_close(free_energy(torch.ones(T, 1).double(), v, beta), v.expand(T, D), rtol=0, atol=0)


def test_controls_are_per_channel_and_per_row() -> None:
    p, v = random_prior(T, S), random_values(S, D)
    beta = random_values(T, D).exp()
    lam = random_values(T, D, seed=2).sigmoid()
    for t in range(T):
        for d in (0, 6):
            row, channel = p[t : t + 1], v[:, d : d + 1]
            b, fraction = beta[t, d].item(), lam[t, d].item()
            assert free_energy(p, v, beta)[t, d] == pytest.approx(free_energy(row, channel, b).item())
            torch.testing.assert_close(posterior(p, v, beta)[t, :, d], posterior(row, channel, b)[0, :, 0])
            hidden = hidden_temperature(row, channel, b, fraction).item()
            assert hidden_temperature(p, v, beta, lam)[t, d].item() == pytest.approx(hidden)
    torch.testing.assert_close(free_energy(p, v, beta[0]), free_energy(p, v, beta[0].expand(T, D)))
    torch.testing.assert_close(free_energy(p, v, torch.tensor(2.0)), free_energy(p, v, 2))


@for_all_reads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_low_precision_is_the_rounded_result(read, dtype: torch.dtype) -> None:
    p, v = random_prior(T, S, dtype=dtype), random_values(S, D, dtype=dtype)
    p_double = p.double() / p.double().sum(-1, keepdim=True)
    result = read(p, v)
    assert result.dtype == dtype
    torch.testing.assert_close(result, read(p_double, v.double()).to(dtype))


def test_constant_values_have_no_unique_temperature() -> None:
    p, v = random_prior(T, S), torch.full((S, D), 0.1, dtype=torch.float64)
    lam = torch.rand(T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    temperature = hidden_temperature(p, v, 3.0, lam)
    torch.testing.assert_close(temperature, 3.0 * lam)
    torch.testing.assert_close(torch.autograd.grad(temperature.sum(), lam)[0], torch.full_like(lam, 3.0))
    nearly = v + 1e-9 * random_values(S, D)
    torch.testing.assert_close(hidden_temperature(p, nearly, 3.0, lam), 3.0 * lam, rtol=1e-7, atol=0)
    assert temperature_for_budget(p, v, 0.01).isinf().all()
    assert (temperature_for_budget(p, v, 0.0) == 0).all()


@pytest.mark.parametrize("beta_max", [1e-8, 1e-3, 1.95, 50.0, 1e6])
def test_hidden_temperature_ends_and_solves_its_equation(beta_max: float) -> None:
    p, v = random_prior(T, S), random_values(S, D)
    mean, most = free_energy(p, v, 0.0), free_energy(p, v, beta_max)
    assert (hidden_temperature(p, v, beta_max, 0.0) == 0).all()
    assert (hidden_temperature(p, v, beta_max, 1.0) == beta_max).all()
    for lam in (1e-6, 0.3, 0.999):
        hidden = hidden_temperature(p, v, beta_max, lam)
        assert ((hidden > 0) & (hidden < beta_max)).all()
        torch.testing.assert_close(free_energy(p, v, hidden), (1 - lam) * mean + lam * most, rtol=0, atol=1e-14)


def test_hidden_temperature_with_a_very_unlikely_maximum() -> None:
    """F stays at the mean until beta is about 69 and then bends: Newton alone would crawl or leave the bracket."""
    p = torch.tensor([[1e-30, 1 - 1e-30]], dtype=torch.float64)
    v = torch.tensor([[1.0], [0.0]], dtype=torch.float64)

    def gain(beta: float) -> float:
        return 1.0 + math.log(1e-30) / beta if beta > 700 else math.log1p(1e-30 * (math.expm1(beta) - beta)) / beta

    for lam in (1e-20, 1e-10, 0.5):
        assert gain(hidden_temperature(p, v, 1e4, lam).item()) == pytest.approx(lam * gain(1e4), rel=1e-12)


def test_budget_ends() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    v = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    most = -math.log(0.5)
    for kl, expected in ((0.0, 0.0), (most, math.inf), (10.0, math.inf), (math.inf, math.inf)):
        assert temperature_for_budget(p, v, kl).item() == expected
    for kl in (1e-12, 1e-4, 0.3, most * (1 - 1e-9)):
        beta = temperature_for_budget(p, v, kl)
        assert 0 < beta.item() < math.inf
        # The difference of two numbers of order one has an absolute error of about 1e-16.
        torch.testing.assert_close(kl_divergence(posterior(p, v, beta), p).item(), kl, rtol=1e-10, atol=3e-16)
    budgets = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64, requires_grad=True)
    answers = temperature_for_budget(p, v.expand(3, 3), budgets)
    (gradient,) = torch.autograd.grad(answers[answers.isfinite()].sum(), budgets)
    assert gradient.isfinite().all()
    assert gradient[1] > 0
    assert gradient[0] == 0
    assert gradient[2] == 0


def test_kl_divergence_counts_zeros_as_zero_and_leaving_the_support_as_infinite() -> None:
    q = torch.tensor([[[1.0, 0.5], [0.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    fair, sure = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(kl_divergence(q, fair).flatten().tolist(), [math.log(2.0), 0.0])
    torch.testing.assert_close(kl_divergence(q, sure).flatten().tolist(), [0.0, math.inf])
    torch.testing.assert_close(kl_divergence(sure, q).flatten().tolist(), [0.0, math.log(2.0)])
    assert torch.autograd.grad(kl_divergence(q, fair).sum(), q)[0].isfinite().all()


def test_first_and_second_derivatives_agree_with_finite_differences() -> None:
    p = random_prior(2, 3).requires_grad_()
    v = random_values(3, 2).requires_grad_()
    beta = torch.tensor([0.4, 60.0], dtype=torch.float64, requires_grad=True)
    lam = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    kl = torch.tensor([0.05, 0.2], dtype=torch.float64, requires_grad=True)
    for read in (free_energy, posterior, posterior_mean):
        assert gradcheck(read, (p, v, beta))
    for read in (hidden_temperature, effective_weights):
        assert gradcheck(read, (p, v, beta, lam))
    assert gradcheck(temperature_for_budget, (p, v, kl))
    assert gradcheck(free_energy, (random_prior(2, 3, 2, dim=-2).requires_grad_(), v, beta))
    moderate = torch.tensor([0.4, 2.0], dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(free_energy, (p, v, beta), fast_mode=True)
    assert gradgradcheck(hidden_temperature, (p, v, moderate, lam), fast_mode=True)
    assert gradgradcheck(temperature_for_budget, (p, v, kl), fast_mode=True)


def test_gradient_of_the_interpolated_read_is_effective_weights() -> None:
    p, v, lam = random_prior(T, S), random_values(S, D).requires_grad_(), 0.3
    read = (1 - lam) * free_energy(p, v, 0.0) + lam * free_energy(p, v, 1.95)
    for t in range(T):
        (gradient,) = torch.autograd.grad(read[t].sum(), v, retain_graph=True)
        torch.testing.assert_close(effective_weights(p, v, 1.95, lam)[t], gradient)


def test_nan_values_on_the_support_are_not_hidden() -> None:
    v = random_values(S, D)
    v[1, 2] = math.nan
    for read in (READS["free_energy"], READS["hidden_temperature"], READS["posterior_mean"]):
        result = read(random_prior(T, S), v)
        assert result[:, 2].isnan().all()
        assert result[:, :2].isfinite().all()


GOOD_P, GOOD_V = random_prior(T, S), random_values(S, D)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "p is a list", lambda: free_energy([[1.0]], GOOD_V, 1.0)),
        (TypeError, r"p has dtype torch.int64", lambda: free_energy(torch.ones(T, S).long(), GOOD_V, 1.0)),
        (TypeError, r"v has dtype torch.bool", lambda: posterior(GOOD_P, GOOD_V > 0, 1.0)),
        (TypeError, r"v has dtype torch.float32; .* torch.float64", lambda: posterior(GOOD_P, GOOD_V.float(), 1.0)),
        (TypeError, r"beta has dtype torch.int64", lambda: free_energy(GOOD_P, GOOD_V, torch.ones(D).long())),
        (TypeError, r"beta is a str", lambda: free_energy(GOOD_P, GOOD_V, "hot")),
        (TypeError, r"beta is a bool", lambda: free_energy(GOOD_P, GOOD_V, True)),
        (ValueError, r"p \[3, 5\].* v \[7, 5\]", lambda: free_energy(GOOD_P, GOOD_V.T, 1.0)),
        (ValueError, r"v \[5\]", lambda: free_energy(GOOD_P, GOOD_V[:, 0], 1.0)),
        (ValueError, r"S >= 1", lambda: free_energy(GOOD_P[:, :0], GOOD_V[:0], 1.0)),
        (ValueError, r"one dimension more than v", lambda: free_energy(torch.ones(T, S, 2).double(), GOOD_V, 1.0)),
        (ValueError, "leading", lambda: free_energy(GOOD_P.expand(2, T, S), GOOD_V.expand(3, S, D), 1.0)),
        (ValueError, "p has negative", lambda: free_energy(-GOOD_P, GOOD_V, 1.0)),
        (ValueError, "p has negative or NaN", lambda: free_energy(GOOD_P * math.nan, GOOD_V, 1.0)),
        (ValueError, r"beta has the value -1.0; allowed is \[0, inf\]", lambda: posterior(GOOD_P, GOOD_V, -1.0)),
        (ValueError, "beta has the value nan", lambda: posterior_mean(GOOD_P, GOOD_V, math.nan)),
        (ValueError, r"beta \[5\] does not broadcast .* \[3, 7\]", lambda: free_energy(GOOD_P, GOOD_V, torch.ones(S))),
        (ValueError, r"beta \[2, 1, 1\]", lambda: free_energy(GOOD_P, GOOD_V, torch.ones(2, 1, 1))),
        (ValueError, r"beta_max .* 0.0; allowed is \(0, inf\)", lambda: hidden_temperature(GOOD_P, GOOD_V, 0.0, 0.5)),
        (ValueError, "beta_max has the value inf", lambda: hidden_temperature(GOOD_P, GOOD_V, math.inf, 0.5)),
        (ValueError, "beta_max has the value -2.0", lambda: effective_weights(GOOD_P, GOOD_V, -2.0, 0.5)),
        (ValueError, r"lam .* 1.5; allowed is \[0, 1\]", lambda: hidden_temperature(GOOD_P, GOOD_V, 1.0, 1.5)),
        (ValueError, "lam has the value -0.1", lambda: effective_weights(GOOD_P, GOOD_V, 1.0, -0.1)),
        (ValueError, "kl has the value -0.1", lambda: temperature_for_budget(GOOD_P, GOOD_V, -0.1)),
        (ValueError, r"q \[3, 5\] and p \[3, 5\]", lambda: kl_divergence(GOOD_P, GOOD_P)),
        (ValueError, "agree in S", lambda: kl_divergence(posterior(GOOD_P, GOOD_V, 1.0), GOOD_P[:, :4])),
        (TypeError, "p has dtype torch.float32", lambda: kl_divergence(GOOD_P[..., None], GOOD_P.float())),
    ],
)
def test_bad_input_is_named(error: type[Exception], message: str, call) -> None:
    with pytest.raises(error, match=message):
        call()
