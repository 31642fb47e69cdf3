"""The tangent kernel of real mixers (paper appendix "FEM-MLP Interaction") and the curvature of the read: closed forms
against automatic differentiation in float64. Where the paper's wording is wrong, the test holds the true statement and
its docstring says what differs. What a read can select, and costs: test_theory_capacity.py."""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.testing import assert_close

from femixer import FreeEnergyMixer
from femixer.free_energy import free_energy
from femixer.models.block import FEMBlock
from femixer.theory import (
    beta_kernel,
    gate_kernel,
    jacobians,
    kernel,
    log_weight_hessian,
    logit_gradient,
    output_kernel,
    prior_kernel,
    read_of,
    tangent_kernels,
    temperature_kernel,
    through,
    value_kernel,
    value_paths,
)

LENGTH, DIM = 5, 14
PRIORS = ("softmax", "linear", "gla", "aft", "decay", "ssm", "mamba")
every_prior = pytest.mark.parametrize("prior", PRIORS)


@cache
def example(prior: str = "softmax", parts: str = "CLTG", kv_heads: int | None = None) -> tuple[FreeEnergyMixer, Tensor]:
    """A mixer in which no parameter is zero, and one sequence."""
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(DIM, 2, prior, parts, kv_heads=kv_heads, dtype=torch.float64)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return mixer, torch.randn(LENGTH, DIM, dtype=torch.float64)


@cache
def kernels(prior: str = "softmax", parts: str = "CLTG", kv_heads: int | None = None) -> dict[str, Tensor]:
    return tangent_kernels(*example(prior, parts, kv_heads))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-3
    assert_close(found, expected, rtol=1e-9, atol=1e-10 * expected.abs().max().item())


# By group of parameters


@every_prior
def test_value_path_kernel_of_a_mixer(prior: str) -> None:
    """K^(V), with the conditioner: a token counts with its own factor 1 + eta."""
    same(value_kernel(read_of(*example(prior))), kernels(prior)["value"])


@pytest.mark.parametrize("parts", ["", "L", "LT", "LG", "G"])
def test_value_path_kernel_of_fewer_parts(parts: str) -> None:
    """Without L the weights are the prior's (w = p), with L and without T the posterior's (w = q)."""
    same(value_kernel(read_of(*example(parts=parts))), kernels(parts=parts)["value"])


def test_heads_that_share_values_add_their_jacobians() -> None:
    """Under grouped heads, not their kernels: the products between heads count too."""
    r = read_of(*example(kv_heads=1))
    same(value_kernel(r), kernels(kv_heads=1)["value"])
    same(beta_kernel(r, example(kv_heads=1)[0].raw_beta), kernels(kv_heads=1)["beta"])
    apart = value_kernel(r._replace(heads=r.heads, shared=1))
    assert (apart - value_kernel(r)).abs().max() > 0.1


@every_prior
def test_kernels_of_the_gates_the_temperature_and_the_output(prior: str) -> None:
    r, expected = read_of(*example(prior)), kernels(prior)
    same(temperature_kernel(r), expected["temperature"])
    same(gate_kernel(r), expected["gate"])
    same(beta_kernel(r, example(prior)[0].raw_beta), expected["beta"])
    same(output_kernel(r), expected["output"])


def test_odds_of_lam_belong_to_the_temperature() -> None:
    torch.manual_seed(5)
    mixer = FreeEnergyMixer(DIM, 2, parts="LT", start="prior", dtype=torch.float64)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    x = normal(LENGTH, DIM)
    same(temperature_kernel(read_of(mixer, x), mixer.lam_odds), tangent_kernels(mixer, x)["temperature"])


@every_prior
def test_prior_path_kernel_is_the_logits_gradient_times_that_of_the_logits(prior: str) -> None:
    same(prior_kernel(*example(prior)), kernels(prior)["prior"])


@every_prior
def test_groups_add_up_to_the_whole_kernel_without_cross_terms(prior: str) -> None:
    """The paper has "+ cross-terms" beside its groups: between groups of parameters there are none. It leaves out the
    output projection, the temperatures and the conditioner, which have kernels of their own."""
    mixer, x = example(prior)
    whole = torch.cat(
        [j.flatten(2) for j in jacobians(lambda: mixer(x[None])[0], dict(mixer.named_parameters())).values()], 2
    )
    same(sum(kernels(prior).values()), kernel(whole))
    assert [*kernels(prior)] == ["value", "prior", "temperature", "gate", "beta", "conditioner", "output"]
    assert all(k.abs().max() > 1e-6 for k in kernels(prior).values())


def test_the_outer_gate_stands_before_the_output_projection() -> None:
    """y = W_O (g * u), the main text's form, and not g * (W_O u), the appendix's: with the latter K^(V) would have the
    gate of the output channel outside its sum. Both agree where the gate is one."""
    r = read_of(*example())
    mixer, x = example()
    assert_close(mixer(x[None])[0], (r.gate * r.read) @ r.out.T + mixer.out_proj.bias)
    assert r.gate.shape[1] == r.out.shape[1] != r.out.shape[0]  # 8 channels are gated, 14 come out


def test_gates_of_tokens_have_no_path_from_the_values() -> None:
    """The paper's K^(lam <- V) and K^(g) arise where gates look at mu and F. Here they look at the token (as in the
    paper's main text), so that W_V reaches the output by one path and these are zero."""
    mixer, x = example(parts="LTG")
    weight = mixer.value_proj.linear.weight
    projected, _ = mixer.prepare(x[None])
    for logits in (projected.lam, projected.gate):
        rows = jacobians(lambda logits=logits: logits[0].flatten(1), {"w": weight})["w"]
        assert not rows[:, :, : mixer.widths.value * mixer.heads].any()


# By path, where gates look at the values


def test_paths_of_value_derived_gates_add_up_and_their_kernels_have_cross_terms() -> None:
    torch.manual_seed(0)
    tokens, w_v, out = normal(5, 7), normal(3, 7), normal(2, 3)
    p, beta = normal(5, 5).tril().exp().tril(), torch.tensor([0.7, 2.0, 1.3], dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    a, b = normal(2, 3, 3), normal(2, 3, 3)

    def lam(mean: Tensor, free: Tensor) -> Tensor:
        return (a[0] @ mean + a[1] @ free).sigmoid()

    def gate(mean: Tensor, free: Tensor) -> Tensor:
        return torch.nn.functional.softplus(b[0] @ mean + b[1] @ free)

    def read() -> Tensor:
        v = tokens @ w_v.T
        mean, free = free_energy(p, v, 0.0), free_energy(p, v, beta)
        rows = [gate(m, f) * torch.lerp(m, f, lam(m, f)) for m, f in zip(mean, free, strict=True)]
        return torch.stack(rows) @ out.T

    paths = value_paths(tokens, w_v, p, beta, out, lam, gate)
    w_v.requires_grad_()
    expected = jacobians(read, {"w_v": w_v})["w_v"]
    same(sum(paths.values()), expected)
    parts = {name: kernel(path) for name, path in paths.items()}
    cross = kernel(expected) - sum(parts.values())
    assert min(k.abs().max() for k in (*parts.values(), cross)) > 1e-3
    constant = value_paths(tokens, w_v.detach(), p, beta, out, lambda m, f: 0 * m + 0.3, lambda m, f: 0 * m + 2.0)
    assert not constant["lam"].any() and not constant["gate"].any()


# The block


def test_the_kernel_of_a_block_is_the_mixers_through_the_mlp_plus_the_mlps() -> None:
    """K_block(t, s) = Phi_t K_mixer(t, s) Phi_s^T + K_MLP(t, s). Phi is 1 + the MLP's Jacobian: the paper's formula has
    no residual, and would lose most of the kernel. The norm before the mixer has a group of its own."""
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(6, 2, "gla", "LTG", dtype=torch.float64)
    block = FEMBlock(6, mixer, 7, 1e-6, 0).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    x = normal(3, 6)
    everything = jacobians(lambda: block(x[None])[0], dict(block.named_parameters()))
    expected = sum(map(kernel, everything.values()))
    of_mlp = sum(kernel(j) for name, j in everything.items() if name.startswith("mlp"))

    y = (x + mixer(block.mixer_norm(x[None]))[0]).detach()
    of_norm = jacobians(lambda: mixer(block.mixer_norm(x[None]))[0], dict(block.mixer_norm.named_parameters()))
    inner = sum(tangent_kernels(mixer, block.mixer_norm(x).detach()).values()) + kernel(of_norm["weight"])

    def after(token: Tensor) -> Tensor:
        return block.mlp(block.mlp_norm(token))

    mlp = torch.stack([torch.autograd.functional.jacobian(after, token) for token in y])
    same(through(inner, torch.eye(6, dtype=torch.float64) + mlp) + of_mlp, expected)
    printed = through(inner, mlp) + of_mlp
    assert (printed - expected).abs().max() > 0.1 * expected.abs().max()


# Geometry


def test_hessian_of_the_free_energy_in_log_weights() -> None:
    """(Diag(q) - q q^T) / beta: positive semidefinite, at most 1 / (2 beta), and zero along (1, ..., 1)."""
    torch.manual_seed(0)
    log_weights, v, beta = normal(3, 5), normal(5, 7), torch.linspace(0.3, 4.0, 7, dtype=torch.float64)
    found = log_weight_hessian(log_weights.exp(), v, beta)
    assert found.shape == (3, 7, 5, 5)
    for t in range(3):
        for d in range(7):
            f = lambda w, d=d: free_energy(w.exp()[None], v[:, d, None], beta[d]).squeeze()  # noqa: E731
            assert_close(found[t, d], hessian(f, log_weights[t]), rtol=1e-8, atol=1e-10)
    eigenvalues = torch.linalg.eigvalsh(found)
    assert (eigenvalues > -1e-12).all() and (eigenvalues <= 0.5 / beta[:, None] + 1e-12).all()
    assert found.sum(-1).abs().max() < 1e-12


def test_gradient_of_the_read_in_normalized_logits() -> None:
    """The paper has lam (q - p) / beta; the mean's part is (1 - lam) p (v - mu)."""
    r = read_of(*example())
    found = logit_gradient(r.prior, r.posterior, r.value, r.beta, r.lam)
    logits = r.prior.clamp_min(1e-300).log().requires_grad_()
    p = logits.softmax(1)
    read = torch.lerp(free_energy(p, r.value, 0.0), free_energy(p, r.value, r.beta), r.lam)
    (expected,) = torch.autograd.grad(read.sum(), logits)
    assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert found.sum(1).abs().max() < 1e-12


def test_a_prior_over_pairs_is_refused() -> None:
    mixer = FreeEnergyMixer(DIM, 2, "mamba-interactive", dtype=torch.float64)
    with pytest.raises(ValueError, match="prior='mamba-interactive' is over pairs"):
        read_of(mixer, normal(LENGTH, DIM))
    with pytest.raises(ValueError, match="no outer gate"):
        gate_kernel(read_of(*example(parts="LT")))
