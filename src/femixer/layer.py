"""Base of every mixer: checks of the inputs, layout, padding, states, and processing of long sequences in stretches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from femixer.layout import Layout, Past, arrange
from femixer.state import State, check_made_by, new_number

# Numbers of x in a stretch: the intermediates of a longer one no longer fit into a CPU's caches.
STRETCH = 2**21


class MixerLayer(nn.Module):
    """Base of layers [B, T, dim] -> [B, T, dim] with mask, segments and a streaming state. A subclass defines `mixed`
    and ends in an output projection."""

    out_proj: nn.Linear
    _reads_on = False  # continues from a state of constant size as fast as it reads a whole sequence

    def __init__(self, dim: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        for name, given in (("dim", dim), ("heads", heads)):
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{name}={given!r} must be a positive integer")
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        if not isinstance(causal, bool):
            raise TypeError(f"causal={causal!r} must be True or False")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r} must be at least 0 and below 1")
        self.dim, self.heads, self.causal = dim, heads, causal
        self.dropout = nn.Dropout(dropout)
        self._owner = new_number(self)

    def mixed(self, x: Tensor, layout: Layout, before: State, keep: bool) -> tuple[Tensor, Any, Tensor | None]:
        """x [B, T, dim], zero at padding -> (y [B, T, dim], the next states of prior and conditioner if `keep`).

        What y is at padding does not matter.
        """
        raise TypeError(f"{type(self).__name__} must define mixed()")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x [B, T, dim] -> y [B, T, dim], with return_state (y, state) for continuing with the next tokens.

        mask bool [B, T]: False is padding, anywhere. segments int [B, T]: a change of id starts a segment, negative is
        padding. state: returned by the call for the tokens before x.
        """
        self.check_inputs(x, mask, segments, state, return_state)
        go_on = self._continue_in_stretches if self._reads_on else self._continue
        y, after = go_on(x, mask, segments, self.before(x, state), return_state)
        return (y, after) if return_state else y

    def _continue(
        self, x: Tensor, mask: Tensor | None, segments: Tensor | None, before: State, keep: bool
    ) -> tuple[Tensor, State]:
        """-> (y, state after x); without `keep` the state is `before`, unchanged."""
        layout, past = self.arrange(x, mask, segments, before.past)
        padding = None if layout.padding is None else layout.padding[..., None]
        if padding is not None:
            # Whatever stands there, also infinity, must not reach a sum, not even multiplied by zero.
            x = x.masked_fill(padding, 0)
        y, memory, context = self.mixed(x, layout, before, keep)
        if padding is not None:
            y = y.masked_fill(padding, 0)
        return y, before.next(past, memory, context) if keep else before

    def _continue_in_stretches(
        self, x: Tensor, mask: Tensor | None, segments: Tensor | None, state: State, keep: bool
    ) -> tuple[Tensor, State]:
        """The same. Without gradients, x is processed in stretches, so that memory is that of a stretch and not of the
        sequence."""
        step = max(1, STRETCH // max(1, x.shape[0] * x.shape[2]))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu" or x.shape[1] <= step:
            return self._continue(x, mask, segments, state, keep)
        x, pieces = x.detach(), []
        for start in range(0, x.shape[1], step):
            here = [None if given is None else given[:, start : start + step] for given in (mask, segments)]
            piece, state = self._continue(x[:, start : start + step], here[0], here[1], state, True)
            pieces.append(piece)
        return torch.cat(pieces, 1), state

    arrange = staticmethod(arrange)

    def check_inputs(
        self, x: Tensor, mask: Tensor | None, segments: Tensor | None, state: State | None, return_state: bool
    ) -> None:
        """Raise an error that names the argument if an input of `forward` is invalid."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating-point tensor, not {getattr(x, 'dtype', type(x).__name__)}")
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed is [batch, tokens, {self.dim}]")
        # A replaced layer (torch's quantize_dynamic, for example) may have no tensor there; its dtype is unknown.
        dtype = getattr(self.out_proj.weight, "dtype", x.dtype)
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x has dtype {x.dtype}; allowed is the mixer's own, {dtype}, or any under autocast")
        if mask is not None and segments is not None:
            raise ValueError("mask and segments were both given; mark padding by negative ids in segments instead")
        for name, given in (("mask", mask), ("segments", segments)):
            if given is None:
                continue
            if not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
            fits = given.dtype == torch.bool
            if name == "segments":
                fits = not (fits or given.is_floating_point() or given.is_complex())
            if not fits:
                wanted = "bool" if name == "mask" else "an integer type"
                raise TypeError(f"{name} has dtype {given.dtype}; allowed is {wanted}")
            if given.shape != x.shape[:2]:
                raise ValueError(f"{name} has shape {tuple(given.shape)}; allowed is {tuple(x.shape[:2])}")
            if given.device != x.device:
                raise ValueError(f"{name} is on {given.device}; allowed is x's device {x.device}")
        if not self.causal and (state is not None or return_state):
            raise ValueError("state and return_state need causal=True; this mixer was built with causal=False")
        if state is None:
            return
        if not isinstance(state, State):
            raise TypeError(f"state must come from this mixer's return_state=True, not {type(state).__name__}")
        if not isinstance(state.owner, str) and state.owner != self._owner:
            raise ValueError("state belongs to another mixer; allowed is a state returned by this one")
        if state.batch != x.shape[0]:
            raise ValueError(f"state has batch size {state.batch}; x has {x.shape[0]}")
        if state.device != x.device:
            raise ValueError(f"state is on {state.device}; x is on {x.device}")

    def before(self, x: Tensor, state: State | None) -> State:
        """The state before x: `state`, or the initial one. A state loaded from a file becomes this mixer's if its
        fingerprint matches."""
        if state is None:
            return State(self._owner, x.shape[0], x.device, Past(), None, None)
        if isinstance(state.owner, str):
            check_made_by(state.owner, self, "state")
            return replace(state, owner=self._owner)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled mixer is a new owner: it does not accept the original's states."""
        super().__setstate__(state)
        self._owner = new_number(self)
