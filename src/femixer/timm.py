"""FEM as the attention of timm's vision transformers.

    timm.models.VisionTransformer(..., attn_layer=timm_attention(prior="gla"))

Versions of timm whose blocks take `attn_layer` make the class with the arguments of timm's own `Attention` and call it
as `attention(x, attn_mask=..., is_causal=...)`. Nothing here imports timm.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from femixer.mixer import FreeEnergyMixer
from femixer.options import check
from femixer.priors import prior_class
from femixer.projection import starting


def timm_attention(prior: str = "softmax", parts: str = "CLTG", **options: Any) -> type[TimmAttention]:
    """The class to give as `attn_layer`. options: others of FreeEnergyMixer, such as budget and prior_options.

    timm adds positions to the patches itself, so rope is off unless it is among the options.
    """
    if prior_class(prior).queries_and_keys:
        options.setdefault("rope", False)
    for name in ("dim", "heads", "causal", "bias", "dropout", "device", "dtype"):
        check(name not in options, name, options.get(name), "nothing: timm gives it")
    return type("FEMAttention", (TimmAttention,), {"options": {"prior": prior, "parts": parts, **options}})


class TimmAttention(nn.Module):
    """FreeEnergyMixer in encoder mode with the signature of timm's Attention. Dropout of attention weights acts on the
    read instead, since a dropped weight has no logarithm."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """norm_layer is there for qk_norm and scale_norm alone, which FEM does not have."""
        super().__init__()
        check(attn_head_dim in (None, dim // num_heads), "attn_head_dim", attn_head_dim, "None: the budget sets it")
        check(dim_out in (None, dim), "dim_out", dim_out, f"None or dim={dim}")
        for name, given in (("qk_norm", qk_norm), ("scale_norm", scale_norm)):
            check(not given, name, given, "False: FEM has no such norm")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mixer = FreeEnergyMixer(
            dim, num_heads, causal=False, bias=qkv_bias, dropout=attn_drop, **self.options, **factory_kwargs
        )
        if proj_bias != qkv_bias:
            self.mixer.out_proj = starting(
                nn.Linear(self.mixer.out_proj.in_features, dim, bias=proj_bias, **factory_kwargs)
            )
            self.mixer.reset_parameters()
        self.proj_drop = nn.Dropout(proj_drop)

    def init_weights(self) -> None:
        """timm starts all linear maps its own way and then calls this: ours start as they must, memory spans spread."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None and type(module).__module__.startswith("femixer."):
                reset()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, dim] -> [B, N, dim]. attn_mask: bool [B, N] or [B, 1, 1, N], False where a token is padding."""
        check(not is_causal, "is_causal", is_causal, "False: this attention was built as an encoder")
        return self.proj_drop(self.mixer(x, mask=padding(attn_mask, x)))


def padding(attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask bool [B, N] of a mask that hides the same tokens from all queries."""
    if attn_mask is None:
        return None
    batch, tokens = x.shape[:2]
    if attn_mask.dtype != torch.bool or attn_mask.shape not in {(batch, tokens), (batch, 1, 1, tokens)}:
        raise ValueError(
            f"attn_mask is {attn_mask.dtype} {tuple(attn_mask.shape)}; allowed is bool [{batch}, {tokens}] or "
            f"[{batch}, 1, 1, {tokens}], False where a token is padding: a prior need not have scores to add to"
        )
    return attn_mask.view(batch, tokens)
