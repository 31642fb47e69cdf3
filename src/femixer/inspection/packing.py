"""An inspection as few bytes, from which a page computes the posterior of any channel.

The posteriors [H, T, T, D] need not be stored: q_s is proportional to p_s exp(beta v_s), so weights and values do.
Axes: H heads, C stored channels of the weights, T tokens, D channels.

    prior      [H, C, cells]  uint16 logarithms; C = 1 where all channels share the prior, else the chosen channels
    posterior  [H, C, cells]  likewise, at beta_max; only where the prior weighs pairs of token and channel, whose
                              posterior does not follow from weights of tokens
    value, hidden_beta, kl    [H, T, D]  uint16 between the smallest and the largest of each head and channel
    lam, gate                 [H, T, D]  uint8 likewise
    beta_max, *_low, *_step   [H, D]     float32; a number is low + step * code

Cells are the T * T pairs of query and key, row by row, or the T (T + 1) / 2 with key <= query where the others
are zero.
A code k > 0 means the weight exp(floor + (k - 1) step) and 0 means zero; floor is the logarithm of the smallest weight.
A float32 weight is so kept within 0.08 %, usually within 0.02 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.inspection.model import Layer

LEVELS = {"value": "uint16", "hidden_beta": "uint16", "lam": "uint8", "gate": "uint8", "kl": "uint16"}


def pack(layer: Layer, channels: Sequence[Sequence[int]]) -> tuple[dict[str, Any], bytes]:
    """What to know about the bytes, and the bytes. `channels`: per head, those whose weights are stored if they differ.

    One text is packed, the first of the batch.
    """
    r, beta_max = layer.inspection, layer.beta_max
    assert r is not None and beta_max is not None
    prior = r.prior[0]
    total = prior.sum(2, keepdim=True, dtype=torch.float64)
    # A posterior is zero where its prior is.
    seen = prior if prior.dim() == 3 else prior.amax(-1)
    causal = bool((seen.triu(1) == 0).all())
    shared = prior.dim() == 3
    arrays: dict[str, np.ndarray] = {"beta_max": beta_max.numpy().astype("<f4")}
    scales = {}
    chosen = prior[..., None] if shared else _of_channels(prior, channels)
    total = total[..., None] if shared else _of_channels(total, channels)
    stored = {"prior": chosen.double().cpu() / torch.where(total > 0, total, 1.0).cpu()}
    if layer.pairs:
        parts = [r.posterior_of(0, head, own) for head, own in enumerate(channels)]
        stored["posterior"] = torch.stack(parts).double().cpu()
    for name, weights in stored.items():
        arrays[name], scales[name] = _logarithms(weights.movedim(-1, 1), causal)
    for name, dtype in LEVELS.items():
        codes, low, step = _levels(getattr(r, name)[0].double().cpu().numpy(), dtype)
        arrays |= {name: codes, f"{name}_low": low, f"{name}_step": step}
    places, data = {}, b""
    for name, array in arrays.items():
        places[name] = {"type": array.dtype.name, "offset": len(data), "bytes": array.nbytes}
        data += array.tobytes()
    heads, length, width = r.value.shape[1:]
    about = {
        "heads": heads,
        "tokens": length,
        "width": width,
        "causal": causal,
        "channels": None if shared else [list(map(int, chosen)) for chosen in channels],
        "pairs": layer.pairs,
        "weights": scales,
        "arrays": places,
    }
    return about, data


def _of_channels(weights: Tensor, channels: Sequence[Sequence[int]]) -> Tensor:
    """[H, T, T, D] -> [H, T, T, C]"""
    return torch.stack([w[..., list(chosen)] for w, chosen in zip(weights, channels, strict=True)])


def _logarithms(weights: Tensor, causal: bool) -> tuple[np.ndarray, dict[str, float]]:
    """[H, C, T, T] -> codes [H, C, cells]"""
    length = weights.shape[-1]
    query, key = torch.tril_indices(length, length)
    cells = weights[..., query, key] if causal else weights.flatten(2)
    logs = cells.log()
    positive = cells > 0
    floor = float(logs[positive].min()) if positive.any() else 0.0
    step = -floor / (2**16 - 2)
    codes = torch.where(positive, ((logs - floor) / (step or 1.0)).round() + 1, 0.0).clamp(max=2**16 - 1)
    return codes.numpy().astype("<u2"), {"floor": floor, "step": step}


def _levels(numbers: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[H, T, D] -> codes of the same shape, low and step [H, D]"""
    low = numbers.min(1)
    step = (numbers.max(1) - low) / np.iinfo(dtype).max
    low, step = low.astype("<f4"), step.astype("<f4")
    codes = np.rint((numbers - low[:, None]) / np.where(step > 0, step, 1)[:, None])
    return codes.clip(0, np.iinfo(dtype).max).astype(np.dtype(dtype).newbyteorder("<")), low, step
