"""The read over pairs as in plain torch, whose recurrence is a compiled loop then; autograd keeps what it needs."""

from femixer.kernels.pair_state_space.plain import forward

__all__ = ["DIFFERENTIABLE", "forward"]

DIFFERENTIABLE = True
