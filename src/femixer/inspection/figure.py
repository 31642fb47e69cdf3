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
    from matplotlib.figure import Figure

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

    figure = Figure(figsize=(3.0 * (1 + len(channels)), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1 + len(channels), height_ratios=[1, 1])

    def heat(axes: Any, data: Tensor, title: str) -> None:
        image = axes.imshow(data, cmap="magma", vmin=0, interpolation="nearest", aspect="auto")
        axes.axhline(row, color="white", linewidth=0.6, linestyle=":")
        axes.set(title=title, xlabel="position read")
        figure.colorbar(image, ax=axes, location="bottom", shrink=0.85, pad=0.02)
        label(axes.xaxis)

    def label(axis: Any) -> None:
        if tokens is not None:
            axis.set_ticks(range(length), tokens, fontsize=6, rotation=90)

    top = [figure.add_subplot(grid[0, i]) for i in range(1 + len(channels))]
    average = "" if prior.dim() == 2 else ", mean over channels"
    heat(top[0], prior_map, f"prior, head {head}{average}")
    top[0].set_ylabel("position t")
    for axes, channel in zip(top[1:], channels, strict=True):
        heat(axes, posterior[..., channel], f"posterior, channel {channel}")

    bottom = figure.add_subplot(grid[1, :])
    strip = prior_map[row][None]
    stack = torch.cat([strip, posterior[row].T]).sqrt()
    bottom.imshow(stack, cmap="magma", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    bottom.axhline(0.5, color="white", linewidth=1.5)
    peak = posterior[row].argmax(0)
    bottom.plot(peak, torch.arange(1, width + 1), "o", color="#56b4e9", markersize=3, label="most likely position")
    step = max(1, width // 8)
    bottom.set_yticks([0, *range(1, width + 1, step)], ["prior", *(f"channel {c}" for c in range(0, width, step))])
    bottom.set(
        title=f"where each channel reads at position {row} (square root of the posterior at beta_max)",
        xlabel="position read",
    )
    bottom.legend(loc="upper right", fontsize=7)
    label(bottom.xaxis)
    figure.savefig(path, dpi=120)
