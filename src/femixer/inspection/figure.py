"""The figure of an inspection: where the prior looks, where each channel looks instead, and what its gates say."""

from __future__ import annotations

import math
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from femixer.optional import require

if TYPE_CHECKING:
    from femixer.inspection.inspection import Inspection

SHOWN = 4
STRIPS = {"lam": "lambda", "gate": "outer gate", "hidden_beta": "hidden beta", "kl": "KL(posterior || prior), nats"}
LABELS_PER_INCH = 11
LONGEST_LABEL = 12


def differing_channels(posterior: Tensor, count: int) -> list[int]:
    """Channels of posterior [S, D] that look at different places: each next one is the farthest from those chosen."""
    flat = posterior.T
    chosen = [int((flat - flat.mean(0)).abs().sum(1).argmax())]
    while len(chosen) < min(count, len(flat)):
        distance = torch.stack([(flat - flat[c]).abs().sum(1) for c in chosen]).amin(0)
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
    return sorted(chosen)


def draw(
    inspection: Inspection,
    path: str | PathLike[str],
    *,
    batch: int,
    head: int,
    row: int,
    channels: list[int] | None,
    tokens: list[str] | None,
) -> None:
    require("matplotlib", extra="plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _check(inspection, batch, head, row, channels, tokens)
    row = row % inspection.prior.shape[2]
    prior = inspection.prior[batch, head].float().cpu()
    at_row = inspection.posterior_of(batch, head, rows=[row])[0].float().cpu()
    channels = differing_channels(at_row, SHOWN) if channels is None else channels
    posterior = inspection.posterior_of(batch, head, channels).float().cpu()
    average = "" if prior.dim() == 2 else " (mean over channels)"
    prior = prior if prior.dim() == 2 else prior.mean(-1)
    labels = None if tokens is None else [_drawable(token) for token in tokens]

    width = max(2.6 * (1 + len(channels)) + 0.8, 8.0)
    figure = Figure(figsize=(width, 9.6), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(3, 1)
    maps, rows, strips = parts
    titled = [(f"prior, head {head}{average}", prior)]
    titled += [(f"posterior, channel {channel}", posterior[..., at]) for at, channel in enumerate(channels)]
    _draw_maps(maps, titled, row, labels, width)
    _draw_channels(rows, prior[row], at_row, head, row, labels, width)
    _draw_strips(strips, {name: getattr(inspection, name)[batch, head] for name in STRIPS}, labels, width)
    figure.savefig(path, dpi=120, format="png")


def _draw_maps(figure: Any, titled: list[tuple[str, Tensor]], row: int, labels: list[str] | None, width: float) -> None:
    """Every query over every key."""
    panels = figure.subplots(1, len(titled), squeeze=False)[0]
    for column, (axes, (title, weights)) in enumerate(zip(panels, titled, strict=True)):
        image = axes.imshow(weights.numpy(), **_weights_look())
        axes.axhline(row, color="white", linewidth=0.6, linestyle=":")
        axes.set_title(title, fontsize=9)
        if column == 0:
            axes.set_ylabel("position t")
            _label(axes.yaxis, labels, 2.2)
        else:
            axes.set_yticks([])
        _label(axes.xaxis, labels, 0.8 * width / len(titled))
    figure.colorbar(image, ax=panels, location="right", pad=0.01, label="probability")


def _draw_channels(
    figure: Any, prior: Tensor, posterior: Tensor, head: int, row: int, labels: list[str] | None, width: float
) -> None:
    """One query: the prior [S] and the posterior of every channel [S, D] over the keys."""
    axes, channels = figure.subplots(), posterior.shape[1]
    image = axes.imshow(torch.cat([prior[None], posterior.T]).numpy(), **_weights_look())
    axes.axhline(0.5, color="white", linewidth=1.5)
    peak = posterior.argmax(0).tolist()
    axes.plot(peak, range(1, channels + 1), "o", color="#56b4e9", markersize=4, label="most likely position")
    step = max(1, channels // 8)
    axes.set_yticks([0, *range(1, channels + 1, step)], ["prior", *(f"channel {c}" for c in range(0, channels, step))])
    at = f"position {row}" if labels is None else f"position {row}, “{labels[row]}”"
    axes.set_title(
        f"where each channel of head {head} reads at {at} (posterior at beta_max)", fontsize=9, parse_math=False
    )
    axes.legend(loc="upper right", fontsize=7)
    axes.set_xlabel("position read")
    _label(axes.xaxis, labels, 0.8 * width)
    figure.colorbar(image, ax=axes, location="right", pad=0.01, label="probability")


def _draw_strips(figure: Any, quantities: dict[str, Tensor], labels: list[str] | None, width: float) -> None:
    """Each quantity [T, D]: every channel over the positions that read."""
    panels = figure.subplots(1, len(quantities), squeeze=False)[0]
    for axes, (name, numbers) in zip(panels, quantities.items(), strict=True):
        image = axes.imshow(
            numbers.T.float().cpu().numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest"
        )
        axes.set_title(STRIPS[name], fontsize=9)
        axes.set_xlabel("position t")
        _label(axes.yaxis, None, 2.2)
        _label(axes.xaxis, labels, 0.7 * width / len(quantities))
        figure.colorbar(image, ax=axes, location="right", pad=0.01)
    panels[0].set_ylabel("channel")


def _weights_look() -> dict[str, Any]:
    """One scale for all weights; the square root keeps small probabilities visible."""
    from matplotlib.colors import PowerNorm

    look: dict[str, Any] = {"cmap": "magma", "interpolation": "nearest", "aspect": "auto"}
    return {**look, "norm": PowerNorm(0.5, vmin=0, vmax=1)}


def _label(axis: Any, labels: list[str] | None, inches: float) -> None:
    """Tokens as ticks, as many as there is room for; numbers without tokens."""
    from matplotlib.ticker import MaxNLocator

    if labels is None:
        axis.set_major_locator(MaxNLocator(integer=True))
        return
    every = math.ceil(len(labels) / (LABELS_PER_INCH * inches))
    shown = range(0, len(labels), every)
    turn = {"rotation": 90} if axis.axis_name == "x" and max(map(len, labels)) > 1 else {}
    # A token may contain $, which would otherwise begin a formula.
    axis.set_ticks(shown, [labels[i] for i in shown], fontsize=6, parse_math=False, **turn)


def _drawable(token: str) -> str:
    """The token, short, with characters that the font does not have as their codes."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    text = "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in token)
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _check(
    inspection: Inspection, batch: int, head: int, row: int, channels: list[int] | None, tokens: list[str] | None
) -> None:
    length, width = inspection.value.shape[-2:]
    for name, index, size in (
        ("batch", batch, inspection.prior.shape[0]),
        ("head", head, inspection.prior.shape[1]),
        ("row", row, length),
        *(("channels", c, width) for c in channels or []),
    ):
        if not -size <= index < size:
            raise ValueError(f"{name}={index} is out of range; allowed is {-size} to {size - 1}")
    if tokens is not None and len(tokens) != length:
        raise ValueError(f"tokens has {len(tokens)} entries; allowed is one per position, {length}")
