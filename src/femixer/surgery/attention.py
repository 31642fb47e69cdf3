"""Attention of transformers with FEM's read, under the name "fem" in its attention interface.

Queries, keys (rotated, normalized, cached), masks, scale and grouped heads arrive as transformers made them, the hidden
states beside them as `fem_states`. Only the read differs:  o = g * ((1 - lam) mu + lam F),  as in femixer.mixer, with

    lam_t = lam_max * sigmoid(a(x_t)),    g_t = softplus(b(x_t)) / rms,    a and b low-rank maps of the hidden states

The function of the trained model is kept by lam_max, which starts at 1e-6: the read starts as the mean, whatever beta
and a are. lam_max is learned as itself, on a linear scale, so its gradient is as large at 1e-6 as anywhere. (In
lam = sigmoid(a - 14) it would be a million times smaller, and a would have to travel 14 units before lam matters.)

Axes: B batch, T queries, S keys, H heads, G key/value heads, E key width, D value width, dim hidden states.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from femixer.gates import gated_read, inverse_temperature
from femixer.kernels.softmax import reading_dtype, softmax_read
from femixer.kernels.softmax_step import softmax_step

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

    def __init__(
        self, dim: int, heads: int, width: int, rank: int, *, up: float, bias: float, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.heads = heads
        self.down = nn.Parameter(torch.empty(rank, dim, **factory_kwargs).normal_(std=dim**-0.5))
        self.up = nn.Parameter(torch.empty(heads * width, rank, **factory_kwargs).normal_(std=up))
        self.bias = nn.Parameter(torch.full((heads * width,), bias, **factory_kwargs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up, self.bias).unflatten(-1, (self.heads, -1))


class ReadGates(nn.Module):
    """The parameters of one attention's free-energy read: heads H, key/value heads G, width D of a head."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, width: int, parts: str, rank: int, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.raw_beta = nn.Parameter(torch.zeros(kv_heads, width, **factory_kwargs))
        self.lam_max = nn.Parameter(torch.full((heads, width), FIRST_LAM, **factory_kwargs))
        self.lam_logits = TokenLogits(dim, heads, width, rank, up=0.02, bias=0.0, **factory_kwargs)
        self.gate_logits = None
        if "G" in parts:
            self.gate_logits = TokenLogits(dim, heads, width, rank, up=0.0, bias=FIRST_GATE, **factory_kwargs)

    @property
    def beta(self) -> Tensor:
        """[G, D], positive; 1.95 at the start."""
        return inverse_temperature(self.raw_beta)

    def lam(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, dim] -> [B, T, H, D] in [0, 1]."""
        return Bounded.apply(self.lam_max) * torch.sigmoid(self.lam_logits(x))


NAME = "fem"
# Things some attentions do to scores or weights, which the read would have to know of.
UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


class Visibility(NamedTuple):
    """Who sees whom: queries are the last T of the S tokens if causal; bias [B or 1, H or 1, T, S] is added to the
    scores, -inf hides; blind [B or 1, H or 1, T, 1] marks rows that see nothing, hidden [B or 1, 1, S, 1] keys that
    nobody sees."""

    causal: bool
    bias: Tensor | None = None
    blind: Tensor | None = None
    hidden: Tensor | None = None


def visibility(mask: Tensor | None, causal: bool, length: int, dtype: torch.dtype) -> Visibility:
    """mask [B or 1, H or 1, T, S]: bool (True is seen), or float, added to the scores."""
    if mask is None:
        return Visibility(causal and length > 1)
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    bias = torch.zeros_like(mask, dtype=dtype) if mask.dtype == torch.bool else mask.to(dtype)
    blind = ~seen.any(-1, keepdim=True)
    # A row that sees nothing has no softmax; let it see everything, its result is thrown away.
    bias = bias.masked_fill(~(seen | blind), -torch.inf)
    if causal and length > 1 and not torch.compiler.is_compiling():
        # A mask need not be causal where the model is; where it is, the kernel need not look at the future.
        causal = not bool(seen.triu(seen.shape[-1] - length + 1).any())
    else:
        causal = False
    return Visibility(causal, bias, blind, ~seen.any((1, 2))[:, None, :, None])


def without_hidden(value: Tensor, hidden: Tensor) -> Tensor:
    """Values [B, G, S, D] with each hidden one replaced by the channel's lowest: they have no weight, but exponentials
    are taken relative to the largest value, and what nobody sees should not set that scale."""
    if not torch.compiler.is_compiling() and not bool(hidden.any()):
        return value
    lowest = value.detach().masked_fill(hidden, torch.inf).amin(2, keepdim=True)
    return torch.where(hidden, lowest.nan_to_num(posinf=0.0), value)


def read(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, seen: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
    """query [B, H, T, E], key [B, G, S, E], value [B, G, S, D], beta [G, D] -> mean, free energy [B, T, H, D]."""
    dtype = reading_dtype(value, beta)
    query, key, value, beta = (x.to(dtype) for x in (query, key, value, beta))
    length, width = query.shape[2:]
    q = query.transpose(1, 2)
    if length == 1 and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        cache = key, value, value.amax(2, keepdim=True)
        mean, free, *_ = softmax_step(q * (scale * width**0.5), None, cache, beta, key.shape[2], bias=seen.bias)
    else:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        mean, free = softmax_read(q, k, v, beta, causal=seen.causal, bias=seen.bias, scale=scale)
    assert free is not None
    return mean, free


def fem_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    fem_states: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, E], key, value [B, G, S, *] -> output [B, T, H, D]."""
    if fem_states is None:  # an attention that was not upgraded: cross-attention to an encoder
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} reads with {name}, which FEM's read does not know")
    gates = module.fem
    assert isinstance(gates, ReadGates)
    length = query.shape[2]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if attention_mask is None and causal and length > 1:
        # A static cache is longer than what it holds; at its start transformers leaves the mask out.
        key, value = key[:, :, :length], value[:, :, :length]
    seen = visibility(attention_mask, causal, length, reading_dtype(value, gates.beta))
    if seen.hidden is not None:
        value = without_hidden(value, seen.hidden)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mean, free = read(query, key, value, gates.beta, seen, scale)
    result = torch.lerp(mean, free, gates.lam(fem_states).to(mean.dtype))
    if gates.gate_logits is not None:
        result = gated_read(result, None, None, gates.gate_logits(fem_states))
    if seen.blind is not None:
        result = result.masked_fill(seen.blind.transpose(1, 2), 0)
    # On the read and not on the weights: the logarithm of a dropped weight is infinite.
    return F.dropout(result, dropout).to(query.dtype), None


def hand_over_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before the attention: its hidden states travel on as a keyword to `fem_attention`."""
    return args, {**kwargs, "fem_states": args[0] if args else kwargs["hidden_states"]}


def refuse_weights(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the model: not every family tells its attention what was asked."""
    if kwargs.get("output_attentions"):
        why = "FEM reads every channel with weights of its own"
        raise ValueError(f"output_attentions=True is not possible after an upgrade: {why}")


def register() -> None:
    AttentionInterface.register(NAME, fem_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
