"""What the read does in a trained model: how far channels leave the prior, and what is lost without each part.

channels that leave the prior   those whose mean KL(posterior at the hidden temperature || prior) is above LEAVES
without L                       every mixer reads the mean: lambda = 0
without G                       the outer gate is 1
without C                       the conditioner modulates nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.damage import check_numbers
from femixer.inspection.inspection import Layer, mixers_of
from femixer.reporting.figures import BLUE, GREY, figure, quiet

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


def table_row(number: int, layer: Layer) -> str:
    """A row of the table under HEADING: means over tokens, heads and channels, and the channel with the largest KL."""
    if layer.inspection is None:
        return _line(number, layer.prior, "", *[""] * len(MEANS), layer.missing)
    found = means(layer)
    numbers = [f"{sum(found[name]) / len(found[name]):.3f}" for name in MEANS]
    kl, head, channel = max((kl, h, d) for h, row in enumerate(found["kl_channels"]) for d, kl in enumerate(row))
    largest = f"{kl:.3f} (head {head}, channel {channel})" if kl >= 5e-4 else "none"
    return _line(number, layer.prior, layer.parts or "none", *numbers, largest)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


HEADING = _line("layer", "prior", "parts", *MEANS.values(), "largest mean KL of a channel") + "|---" * 8 + "|\n"


LEAVES = 0.01
"""Nats, on average over the tokens: a channel that leaves its prior by less reads the mean for all one can see."""
PARTS = {"L": "every mixer reads the mean", "G": "the outer gate is 1", "C": "no conditioner"}


class LayerUsage(NamedTuple):
    """Of one layer: lambda, hidden temperature relative to beta_max and KL, of every token, head and channel [N]; the
    mean KL of each channel [H D]."""

    name: str
    parts: str
    lam: Tensor
    temperature: Tensor
    kl: Tensor
    kl_of_channels: Tensor

    @property
    def leaving(self) -> float:
        """The share of channels that leave the prior."""
        return float((self.kl_of_channels > LEAVES).double().mean())


def layers_usage(layers: Iterable[Layer]) -> Iterator[LayerUsage]:
    """Of the layers that can be inspected, one after the other."""
    for layer in layers:
        r = layer.inspection
        if r is None or layer.beta_max is None:
            continue
        beta = layer.beta_max.double()[:, None].clamp_min(1e-12)
        yield LayerUsage(
            layer.name,
            layer.parts,
            r.lam.double().flatten(),
            (r.hidden_beta.double().cpu() / beta).flatten(),
            r.kl.double().flatten(),
            r.kl.double().mean((0, 2)).flatten(),
        )


@contextmanager
def without(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, no mixer of the model uses this part: L, G or C."""
    if part not in PARTS:
        raise ValueError(f"part={part!r} is unknown; choose one of {', '.join(PARTS)}")
    mixers: list[Any] = [m for m in mixers_of(model).values() if part in getattr(m, "parts", "")]
    for mixer in mixers:
        if part == "L":
            mixer._beta = lambda: None
        else:
            mixer._columns = _columns_without(mixer, part)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.__dict__["_beta" if part == "L" else "_columns"]


def _columns_without(mixer: Any, part: str) -> Any:
    columns = mixer._columns
    if part == "C":
        return lambda x, features, context: columns(x, None, context)
    return lambda *given: columns(*given)._replace(gate=None)


def parts_of(model: nn.Module) -> list[str]:
    """The parts that can be switched off in some mixer of the model."""
    used = {part for mixer in mixers_of(model).values() for part in getattr(mixer, "parts", "")}
    return [part for part in PARTS if part in used]


@torch.no_grad()
def loss(model: Any, tokens: Sequence[int], length: int) -> float:
    """Mean cross entropy in nats per token of a text, read in stretches of `length` tokens."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, length):
        ids = torch.tensor([tokens[start : start + length + 1]], device=model.device)
        if ids.shape[1] < 2:
            break
        logits = model(ids[:, :-1], use_cache=False).logits.double()
        total += float(nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def draw(usages: Sequence[LayerUsage]) -> Any:
    """Histograms by layer: lambda, hidden temperature, KL, and the mean KL of the channels, sorted."""
    drawing = figure(11, 1.0 + 1.5 * len(usages))
    panels = drawing.subplots(len(usages), 4, squeeze=False)
    titles = ("lambda", "hidden temperature / beta_max", "KL(posterior || prior), nats", "mean KL by channel, sorted")
    widest = max([LEAVES * 2, *(float(usage.kl.max()) for usage in usages)])
    for row, usage in zip(panels, usages, strict=True):
        for axes, numbers, edge in (
            (row[0], usage.lam, 1.0),
            (row[1], usage.temperature, 1.0),
            (row[2], usage.kl, widest),
        ):
            axes.hist(numbers.clamp(0, edge).numpy(), bins=40, range=(0, edge), color=BLUE, log=True)
        row[3].plot(usage.kl_of_channels.sort(descending=True).values.numpy(), color=BLUE)
        row[3].axhline(LEAVES, color=GREY, linestyle=":")
        row[3].set_yscale("symlog", linthresh=LEAVES)
        row[3].set_ylim(bottom=0)
        row[0].set_ylabel(f"{usage.name}\n{usage.leaving:.0%} of channels leave", fontsize=7)
        for axes in row:
            quiet(axes)
            axes.tick_params(labelsize=7)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return drawing
