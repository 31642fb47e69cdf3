"""What an upgraded attention gains: inverse temperatures, the temperature gate lam and, on request, the outer gate g.

    lam_t = lam_max * sigmoid(a(x_t)),    g_t = softplus(b(x_t)) / rms,    a and b low-rank maps of the hidden states

The function of the trained model is kept by lam_max, which starts at 1e-6: the read starts as the mean, whatever beta
and a are. lam_max is learned as itself, on a linear scale, so its gradient is as large at 1e-6 as anywhere. (In
lam = sigmoid(a - 14) it would be a million times smaller, and a would have to travel 14 units before lam matters.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from femixer.gates import inverse_temperature

PARTS = ("LT", "LTG")
FIRST_LAM = 1e-6
# Here softplus / rms of equal logits is 1 to the last digit of float32; at zero it is 1 - 1e-6.
FIRST_GATE = 4.0


class Bounded(torch.autograd.Function):
    """x clamped to [0, 1]; a gradient is dropped only where following it would lead out of the interval.

    With clamp's own gradient a channel whose lam_max was once pushed below zero would stay there forever.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.masked_fill(((x <= 0) & (grad > 0)) | ((x >= 1) & (grad < 0)), 0)


class TokenLogits(nn.Module):
    """up @ (down @ x) + bias: x [B, T, dim] -> [B, T, heads, width].

    Parameters and no nn.Linear: transformers would initialise that its own way when it finds one.
    """

    def __init__(self, dim: int, heads: int, width: int, rank: int, *, up: float, bias: float, **made: Any) -> None:
        super().__init__()
        self.heads = heads
        self.down = nn.Parameter(torch.empty(rank, dim, **made).normal_(std=dim**-0.5))
        self.up = nn.Parameter(torch.empty(heads * width, rank, **made).normal_(std=up))
        self.bias = nn.Parameter(torch.full((heads * width,), bias, **made))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up, self.bias).unflatten(-1, (self.heads, -1))


class ReadGates(nn.Module):
    """The parameters of one attention's free-energy read: heads H, key/value heads G, width D of a head."""

    def __init__(self, dim: int, heads: int, kv_heads: int, width: int, parts: str, rank: int, **made: Any) -> None:
        super().__init__()
        self.raw_beta = nn.Parameter(torch.zeros(kv_heads, width, **made))
        self.lam_max = nn.Parameter(torch.full((heads, width), FIRST_LAM, **made))
        self.lam_logits = TokenLogits(dim, heads, width, rank, up=0.02, bias=0.0, **made)
        self.gate_logits = None
        if "G" in parts:
            self.gate_logits = TokenLogits(dim, heads, width, rank, up=0.0, bias=FIRST_GATE, **made)

    @property
    def beta(self) -> Tensor:
        """[G, D], positive; 1.95 at the start."""
        return inverse_temperature(self.raw_beta)

    def lam(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, dim] -> [B, T, H, D] in [0, 1]."""
        return Bounded.apply(self.lam_max) * torch.sigmoid(self.lam_logits(x))
