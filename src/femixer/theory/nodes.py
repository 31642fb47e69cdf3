"""The paper's ways to read a past, from the freest to the cheapest ("A compute-expressivity trade-off path"), built and
counted: operations of matrix products, bytes that a pass writes, bytes that must be kept to read the next token.

    (0) general    o_t = f(x_1, ..., x_t)                     a two-layer MLP on the flattened, padded past
    (1) additive   o_t = sum_{i <= t} g(x_i, x_1, ..., x_t)   the same MLP with x_i in front, once for every pair
        FEM        o_t = g [(1 - lam) mu + lam F]             parts LTG on (2)'s prior
    (2) attention  o_t = sum_{i <= t} p_t(i) v_i
    (3) fixed      o_t = phi(q_t) S_t / phi(q_t) z_t          the prior `linear`, read by its mean
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from femixer.bench.cost import flops, held_bytes
from femixer.kernels.dispatch import use_backend
from femixer.mixer import FreeEnergyMixer


class General(nn.Module):
    """x [1, T, dim] -> [1, T, dim]: an MLP reads each past, flattened and padded to `length` tokens."""

    def __init__(self, dim: int, length: int, additive: bool, **made: Any) -> None:
        super().__init__()
        self.length, self.additive = length, additive
        self.up = nn.Linear((length + additive) * dim, dim, **made)
        self.down = nn.Linear(dim, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        (tokens,), length = x, self.length
        causal = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
        pasts = (causal[:, :, None] * tokens).flatten(1)  # [T, T * dim]
        if not self.additive:
            return self.down(self.up(pasts).relu())[None]
        pairs = torch.cat([tokens.expand(length, -1, -1), pasts[:, None].expand(-1, length, -1)], -1)
        return (self.down(self.up(pairs).relu()) * causal[:, :, None]).sum(1)[None]


class NodeCost(NamedTuple):
    flops: int
    written: int  # bytes
    kept: int  # bytes


def nodes(dim: int, length: int, heads: int, **made: Any) -> dict[str, nn.Module]:
    """The five of them by name, for sequences of one length."""
    return {
        "(0) general map": General(dim, length, False, **made),
        "(1) additive map": General(dim, length, True, **made),
        "FEM, softmax prior": FreeEnergyMixer(dim, heads, "softmax", "LTG", **made),
        "(2) attention": FreeEnergyMixer(dim, heads, "softmax", "", **made),
        "(3) fixed state": FreeEnergyMixer(dim, heads, "linear", "", **made),
    }


def cost(node: nn.Module, dim: int, length: int) -> NodeCost:
    """Counted on tensors without data, in plain torch."""
    x = torch.empty(1, length, dim, device="meta")
    operations = flops(lambda: node(x))
    with torch.no_grad(), use_backend("plain"):
        with Written() as written:
            node(x)
        kept = x.numel() * x.element_size()  # a general map needs the tokens themselves
        if isinstance(node, FreeEnergyMixer):
            kept = held_bytes(node(x, return_state=True)[1].prior)
    return NodeCost(operations, written.bytes, kept)


class Written(TorchDispatchMode):
    """Bytes of the results of all operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in given:
                self.bytes += result.numel() * result.element_size()
        return results


def state_numbers(mixer: FreeEnergyMixer, tokens: int) -> int:
    """How many float32 numbers the prior of a stream holds after so many tokens; the mixer is on device="meta"."""
    with torch.no_grad(), use_backend("plain"):
        state = mixer(torch.empty(1, tokens, mixer.dim, device="meta"), return_state=True)[1]
    return held_bytes(state.prior) // 4
