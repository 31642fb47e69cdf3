"""One HTML file to look around in what a model reads: complete in itself, it asks nothing of any other place.

It has each inspection as few bytes, from which it computes the posterior of any channel: the posteriors [H, T, T, D]
need not be stored, for q_s is proportional to p_s exp(beta v_s), so weights and values do. Axes: H heads, C stored
channels of the weights, T tokens, D channels.

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

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.damage import check_numbers
from femixer.inspection.inspection import Inspection, Layer, layer_of
from femixer.training import atomic

MEANS = {"lam": "lambda", "gate": "gate", "hidden_beta": "hidden beta", "kl": "KL (nats)"}


def means(layer: Layer) -> dict[str, Any]:
    """Means over tokens: each quantity per head [H], over channels too, and `kl_channels` [H, D]."""
    r = layer.inspection
    assert r is not None
    found = {name: getattr(r, name)[0].double().mean((1, 2)).tolist() for name in MEANS}
    check_numbers(found, f"what {layer.name} reads")
    return {**found, "kl_channels": r.kl[0].double().mean(1).tolist()}


def channels_by_kl(layer: Layer, count: int) -> list[list[int]]:
    """Per head the `count` channels with the largest mean KL, the largest first."""
    assert layer.inspection is not None
    kl: Tensor = layer.inspection.kl[0].double().mean(1)
    return kl.argsort(dim=1, descending=True, stable=True)[:, :count].tolist()


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


STORED_CHANNELS = 8
"""Channels of a head whose weights are stored where the prior differs per channel."""
LARGEST = 150
"""Megabytes that a page may have; browsers become slow beyond."""
LARGEST_EMBEDDED = 8
"""Megabytes of a page inside a notebook, which keeps it in its file."""


def write_page(
    path: Path, layers: Iterable[Layer], tokens: Sequence[str], *, model: str, text: str, **more: Any
) -> int:
    """Write the page of one text and return its size in bytes; the arguments are those of `page_text`: more are note,
    query, channels and count."""
    atomic.write(path, page_text(layers, tokens, model=model, text=text, **more))
    return path.stat().st_size


def page_text(
    layers: Iterable[Layer],
    tokens: Sequence[str],
    *,
    model: str,
    text: str,
    note: str = "",
    query: int | None = None,
    channels: Sequence[int] | None = None,
    count: int | None = None,
) -> str:
    """The page of one text, as HTML.

    tokens: a label for each. model, text and note are shown as they are. query: the token selected at first, by default
    one at which a channel leaves the prior most. channels: those to store in every head where the prior differs per
    channel, by default the ones with the largest KL. count: how many layers there are, to foresee too large a page.
    """
    shown: list[dict[str, Any]] = []
    blobs: list[str] = []
    for layer in layers:
        about: dict[str, Any] = {"name": layer.name, "prior": layer.prior, "parts": layer.parts}
        shown.append(about)
        if layer.inspection is None:
            about["missing"] = layer.missing
            continue
        heads, length = layer.inspection.lam.shape[1:3]
        if length != len(tokens):
            raise ValueError(f"tokens has {len(tokens)} entries; allowed is one per position, {length}")
        chosen = [list(channels)] * heads if channels else channels_by_kl(layer, STORED_CHANNELS)
        packed, data = pack(layer, chosen)
        about |= {**packed, "normalized": layer.normalized, "means": _rounded(means(layer))}
        blobs.append(_script(f"layer-{len(shown) - 1}", "application/octet-stream", base64.b64encode(data).decode()))
        _check_size(sum(map(len, blobs)) * max(len(blobs), count or 0) // len(blobs), len(tokens))
    query = None if query is None else query % len(tokens)
    page = {"model": model, "text": text, "note": note, "tokens": list(tokens), "query": query, "layers": shown}
    parts = {
        "title": html.escape(f"What {model} reads"),
        "style": _asset("page.css"),
        "data": _script("page", "application/json", _json(page)),
        "layers": "\n".join(blobs),
        "script": _asset("data.js") + _asset("page.js"),
    }
    # One pass: what is put in is not searched for places to put things in.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def embedded(inspection: Inspection) -> str:
    """The page of one mixer as a frame of a notebook, or a line that says why there is none."""
    layer = layer_of(inspection)
    tokens = [str(position) for position in range(inspection.value.shape[2])]
    page = page_text([layer], tokens, model=f"a mixer with prior {layer.prior}", text=" ".join(tokens))
    if len(page) > LARGEST_EMBEDDED * 10**6:
        too_large = f"{len(page) / 1e6:.0f} MB are too many for a notebook (allowed are {LARGEST_EMBEDDED})"
        return f"<p>{too_large}; write them with femixer.inspection.write_page.</p>"
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 760px; border: 0"></iframe>'


def check_size(mixers: Iterable[Any], tokens: int) -> None:
    """Raise a ValueError if the page of these mixers' layers would be too large: before anything is computed."""
    size = 0
    for mixer in mixers:
        heads, width = mixer.beta_max.shape
        cells = tokens * (tokens + 1) // 2 if mixer.causal else tokens**2
        kinds = 1 if mixer.prior.queries_and_keys else (1 + mixer.prior.one_temperature) * min(STORED_CHANNELS, width)
        size += 4 * heads * (2 * kinds * cells + 8 * tokens * width) // 3
    _check_size(size, tokens)


def _asset(name: str) -> str:
    return (files("femixer.inspection") / "assets" / name).read_text(encoding="utf-8")


def _script(name: str, kind: str, content: str) -> str:
    return f'<script id="{name}" type="{kind}">{content}</script>'


def _json(value: Any) -> str:
    """JSON that can stand inside <script>: no tag can begin or end in it, and no lone surrogate is left."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.4g}")


def _check_size(size: int, tokens: int) -> None:
    if size > LARGEST * 10**6:
        raise ValueError(
            f"a page of {tokens} tokens would have about {size / 1e6:.0f} MB; allowed are {LARGEST}. "
            "Choose fewer tokens (--max-tokens) or some of the layers (--layers)"
        )
