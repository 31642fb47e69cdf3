"""Derivatives of the read in the prior. Axes as in femixer.free_energy."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.free_energy import posterior


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
