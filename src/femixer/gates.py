"""Temperature and gates of the read: o = g * ((1 - lam) mu + lam F), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.gates import gated
from femixer.kernels.operator import handed_dtype

# Added to the mean square that the outer gate is divided by.
EPS = 1e-6
# softplus underflows to zero for a parameter far below zero, and a temperature is divided by.
LEAST_BETA = 1e-6
# Odds of lambda that have come to zero: far below, no gradient would lead back.
LEAST_ODDS = 1e-6
# How a layer starts that is to begin as its prior's mean read to 1e-3: lambda, and beta_max where there is no lambda.
# F - mu is about beta_max * variance / 2. It is lambda that starts small and not beta_max, because a small beta_max
# loses digits of F and leaves its start slowly: one number per channel, while lambda has a map of the whole token.
SMALL_LAM, SMALL_BETA = 1e-4, 1e-3


def inverse_temperature(parameter: Tensor) -> Tensor:
    """beta_max = softplus(parameter + 1.8), positive; 1.95 where the parameter starts, at zero."""
    return F.threshold(F.softplus(parameter + 1.8), LEAST_BETA, LEAST_BETA)


def raw_temperature(beta: float) -> float:
    """The parameter whose inverse_temperature is beta."""
    return math.log(math.expm1(beta)) - 1.8


def temperature_gate(logits: Tensor) -> Tensor:
    """lam = sigmoid(logits) in [0, 1]."""
    return torch.sigmoid(logits)


def lam_logits(logits: Tensor, odds: Tensor) -> Tensor:
    """a + log |odds|, of which lam = |odds| e^a / (1 + |odds| e^a): logits a [B, T, H, D], odds [H, D].

    The odds are learned as themselves, on a linear scale. A bias would do the same to lam, but steps of Adam have one
    length: from the logit of 1e-4 they need thousands to arrive where lam matters, from odds of 1e-4 about a hundred at
    a learning rate of 2e-3. The sign makes no difference, so that zero is no end of the way.
    """
    size = torch.where(odds < 0, -odds, odds)  # unlike that of abs, its slope is not zero at zero
    return logits + (size + LEAST_ODDS).log().to(logits.dtype)


def outer_gate(logits: Tensor, eps: float = EPS) -> Tensor:
    """g = softplus(logits) / rms over the last dim (the channels of a head), positive."""
    positive = F.softplus(logits)
    return positive * torch.rsqrt(positive.square().mean(-1, keepdim=True) + eps)


def gated_read(
    mean: Tensor, free: Tensor | None, lam_logits: Tensor | None, gate_logits: Tensor | None, eps: float = EPS
) -> Tensor:
    """Each [B, T, H, D]. Without `free` the read is the mean; without lam_logits it is the free energy. The logits may
    have fewer digits; a gated read has theirs."""
    if free is None or lam_logits is None:
        mean, free, lam_logits = mean if free is None else free, None, None
    logits = gate_logits if lam_logits is None else lam_logits
    if logits is None:
        return mean
    dtype = handed_dtype(logits)
    lam = None if lam_logits is None else lam_logits.to(dtype)
    gate = None if gate_logits is None else gate_logits.to(dtype)
    return gated(mean, free, lam, gate, eps).to(logits.dtype)
