"""One HTML file to look around in what a model reads: complete in itself, it asks nothing of any other place."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from femixer.inspection.inspection import Inspection
from femixer.inspection.model import Layer, layer_of
from femixer.inspection.packing import pack
from femixer.inspection.summary import channels_by_kl, means
from femixer.training import atomic

STORED_CHANNELS = 8
"""Channels of a head whose weights are stored where the prior differs per channel."""
LARGEST = 150
"""Megabytes that a page may have; browsers become slow beyond."""
LARGEST_EMBEDDED = 8
"""Megabytes of a page inside a notebook, which keeps it in its file."""


def write_page(
    path: Path,
    layers: Iterable[Layer],
    tokens: Sequence[str],
    *,
    model: str,
    text: str,
    note: str = "",
    query: int | None = None,
    channels: Sequence[int] | None = None,
    count: int | None = None,
) -> int:
    """Write the page of one text and return its size in bytes; the arguments are those of `page_text`."""
    about: dict[str, Any] = {"model": model, "text": text, "note": note, "query": query}
    atomic.write(path, page_text(layers, tokens, **about, channels=channels, count=count))
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
    layer = layer_of("mixer", inspection)
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
