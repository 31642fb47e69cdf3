"""Temperature and gates of the read: o = g * ((1 - lam) mu + lam F), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.gates import gated
from femixer.kernels.operator import handed_dtype

# Added to the mean square in the outer gate's rms.
EPS = 1e-6
# softplus underflows to zero for a parameter far below zero, but the free energy divides by beta.
LEAST_BETA = 1e-6
# Added to |odds| of lambda, so that odds of zero still have a finite logarithm and a gradient.
LEAST_ODDS = 1e-6
# Initial lambda with start="prior", and initial beta_max where there is no lambda: the layer starts as its prior's mean
# read to 1e-3. F - mu is about beta_max * variance / 2, so a small beta_max would do as well. But it loses digits of F
# and grows slowly: it is one number per channel, while lambda has a projection of the whole token.
SMALL_LAM, SMALL_BETA = 1e-4, 1e-3


def inverse_temperature(parameter: Tensor) -> Tensor:
    """beta_max = softplus(parameter + 1.8) > 0; the parameter starts at zero, beta_max at 1.95."""
    return F.threshold(F.softplus(parameter + 1.8), LEAST_BETA, LEAST_BETA)


def raw_temperature(beta: float) -> float:
    """The parameter whose inverse_temperature is beta."""
    return math.log(math.expm1(beta)) - 1.8


def temperature_gate(logits: Tensor) -> Tensor:
    """lam = sigmoid(logits) in [0, 1]."""
    return torch.sigmoid(logits)


def lam_logits(logits: Tensor, odds: Tensor) -> Tensor:
    """a + log |odds|, so that lam = |odds| e^a / (1 + |odds| e^a): logits a [B, T, H, D], odds [H, D].

    The odds are learned on a linear scale. A bias has the same effect on lam, but Adam's steps have a fixed length:
    from the logit of 1e-4 they need thousands to reach a lam that matters, from odds of 1e-4 about a hundred at a
    learning rate of 2e-3. Only the absolute value counts, so the odds can cross zero.
    """
    size = torch.where(odds < 0, -odds, odds)  # abs, but with a nonzero slope at zero
    return logits + (size + LEAST_ODDS).log().to(logits.dtype)


def outer_gate(logits: Tensor) -> Tensor:
    """g = softplus(logits) / rms over the last dim (the channels of a head), positive."""
    positive = F.softplus(logits)
    return positive * torch.rsqrt(positive.square().mean(-1, keepdim=True) + EPS)


def gated_read(mean: Tensor, free: Tensor | None, lam_logits: Tensor | None, gate_logits: Tensor | None) -> Tensor:
    """o = g * ((1 - lam) mean + lam free), each [B, T, H, D].

    Without `free` the read is the mean, without lam_logits the free energy; without gate_logits g = 1. The result has
    the dtype of the logits, which may be lower than that of the reads.
    """
    if free is None or lam_logits is None:
        mean, free, lam_logits = mean if free is None else free, None, None
    logits = gate_logits if lam_logits is None else lam_logits
    if logits is None:
        return mean
    dtype = handed_dtype(logits)
    lam = None if lam_logits is None else lam_logits.to(dtype)
    gate = None if gate_logits is None else gate_logits.to(dtype)
    return gated(mean, free, lam, gate, EPS).to(logits.dtype)
