"""The figure of an inspection: where the prior looks, and where each channel looks instead."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from femixer.optional import require

if TYPE_CHECKING:
    from femixer.inspection.inspection import Inspection

SHOWN = 4


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
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    length, width = inspection.posterior.shape[-2:]
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

    row = row % length
    posterior = inspection.posterior[batch, head].float().cpu()
    prior = inspection.prior[batch, head].float().cpu()
    channels = differing_channels(posterior[row], SHOWN) if channels is None else channels
    prior_map = prior if prior.dim() == 2 else prior.mean(-1)

    figure = Figure(figsize=(2.6 * (1 + len(channels)) + 0.8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1 + len(channels))
    # One scale for all panels; the square root keeps small probabilities visible.
    scale: dict[str, Any] = {
        "cmap": "magma",
        "norm": PowerNorm(0.5, vmin=0, vmax=1),
        "interpolation": "nearest",
        "aspect": "auto",
    }

    def label(axes: Any) -> None:
        axes.set_xlabel("position read")
        if tokens is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axes.set_xticks(range(length), tokens, fontsize=6, rotation=90)

    average = "" if prior.dim() == 2 else " (mean over channels)"
    maps = [(f"prior, head {head}{average}", prior_map)]
    maps += [(f"posterior, channel {channel}", posterior[..., channel]) for channel in channels]
    for column, (title, data) in enumerate(maps):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(data.numpy(), **scale)
        axes.axhline(row, color="white", linewidth=0.6, linestyle=":")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, ylabel="" if column else "position t")
        label(axes)

    bottom = figure.add_subplot(grid[1, :])
    image = bottom.imshow(torch.cat([prior_map[row][None], posterior[row].T]).numpy(), **scale)
    bottom.axhline(0.5, color="white", linewidth=1.5)
    peak = posterior[row].argmax(0)
    bottom.plot(peak.tolist(), range(1, width + 1), "o", color="#56b4e9", markersize=4, label="most likely position")
    step = max(1, width // 8)
    bottom.set_yticks([0, *range(1, width + 1, step)], ["prior", *(f"channel {c}" for c in range(0, width, step))])
    bottom.set_title(f"where each channel of head {head} reads at position {row} (posterior at beta_max)")
    bottom.legend(loc="upper right", fontsize=7)
    label(bottom)
    figure.colorbar(image, ax=figure.axes, location="right", shrink=0.6, pad=0.01, label="probability")
    figure.savefig(path, dpi=120)
