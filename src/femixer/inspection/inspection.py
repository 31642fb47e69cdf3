"""The tensors behind one call of a mixer, or of all mixers of a model, computed from the dense prior in float64, and
their figure: where the prior looks, where each channel looks instead, and what its gates say.

What is kept of T tokens grows with T²; posteriors, which take D times as much, are computed when they are asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from femixer.free_energy import free_energy, hidden_temperature, kl_divergence, posterior
from femixer.gates import outer_gate, temperature_gate
from femixer.reporting.figures import figure

if TYPE_CHECKING:
    from femixer.mixer import FreeEnergyMixer


# Queries are taken in blocks of so many dense numbers: that fits into a cache, and memory stays bounded.
MOST_NUMBERS = 2**18
LARGEST = 4 * 2**30
"""Bytes that the prior of one call, or all its posteriors, may have."""


@dataclass(frozen=True)
class Layer:
    """One mixer of a model and its inspection; None for a mixer without `inspect`."""

    name: str  #: the mixer's name in the model
    prior: str  #: the prior's name, or the mixer's class where it has none
    parts: str = ""
    pairs: bool = False  #: the prior weighs pairs of token and channel, and is shown summed over channels
    normalized: bool = True  #: False: the mixer reads with weights that do not sum to one
    beta_max: Tensor | None = None  #: [H, D], float32 on the CPU
    inspection: Inspection | None = None
    missing: str = ""  #: why there is no inspection


@dataclass(frozen=True, repr=False)
class Inspection:
    """Axes: B batch, H heads, T positions (queries, then keys), D value channels of a head."""

    prior: Tensor  #: [B, H, T, T], or [B, H, T, T, D] where it differs per channel
    value: Tensor  #: [B, H, T, D]
    mean: Tensor  #: [B, H, T, D], E_prior[v]
    free_energy: Tensor  #: [B, H, T, D], at beta_max
    posterior_mean: Tensor  #: [B, H, T, D], E_posterior[v]
    lam: Tensor  #: [B, H, T, D], 1 where the mixer has no temperature gate, 0 where it reads the mean
    gate: Tensor  #: [B, H, T, D], 1 where the mixer has no outer gate
    read: Tensor  #: [B, H, T, D], (1 - lam) mean + lam free_energy, or lam posterior_mean: the readout
    hidden_beta: Tensor  #: [B, H, T, D], the temperature whose free energy is (1 - lam) mean + lam free_energy
    kl: Tensor  #: [B, H, T, D], KL(posterior at hidden_beta || prior), the prior normalized
    _posteriors: Callable[[Tensor], Tensor] = field(repr=False, compare=False)  # query numbers [n] -> [B, H, n, T, D]
    layer: Layer | None = None  #: the mixer, where it is one

    @functools.cached_property
    def posterior(self) -> Tensor:
        """[B, H, T, T, D], at beta_max; computed when first asked for, and refused where it is too large."""
        batch, heads, length, width = self.value.shape
        check_bytes(batch * heads * length**2 * width * self.value.element_size(), length, "posteriors")
        found = self.value.new_empty(batch, heads, length, length, width)
        for rows in blocks(length, self.value):
            found[:, :, rows] = self._posteriors(rows).to(found.dtype)
        return found

    def posterior_of(
        self, batch: int, head: int, channels: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> Tensor:
        """[rows, T, channels] of one head: the same for some queries and channels, by default all."""
        length, width = self.value.shape[2:]
        channels = range(width) if channels is None else channels
        queries = torch.tensor([*(range(length) if rows is None else rows)], device=self.value.device)
        found = self.value.new_empty(len(queries), length, len(channels))
        for some in blocks(len(queries), self.value):
            found[some] = self._posteriors(queries[some])[batch, head][..., [*channels]].to(found.dtype)
        return found

    def __repr__(self) -> str:
        batch, heads, tokens, channels = self.value.shape
        return (
            f"Inspection(batch={batch}, heads={heads}, tokens={tokens}, channels={channels}, dtype={self.read.dtype})"
        )

    def plot(
        self,
        path: str | PathLike[str],
        *,
        batch: int = 0,
        head: int = 0,
        row: int = -1,
        channels: list[int] | None = None,
        tokens: list[str] | None = None,
    ) -> None:
        """Draw prior and per-channel posteriors of one head; `row` is the position whose channels are compared."""
        _check(self, batch, head, row, channels, tokens)
        row = row % self.prior.shape[2]
        prior = self.prior[batch, head].float().cpu()
        at_row = self.posterior_of(batch, head, rows=[row])[0].float().cpu()
        channels = differing_channels(at_row, SHOWN) if channels is None else channels
        posterior = self.posterior_of(batch, head, channels).float().cpu()
        average = "" if prior.dim() == 2 else " (mean over channels)"
        prior = prior if prior.dim() == 2 else prior.mean(-1)
        width = max(2.6 * (1 + len(channels)) + 0.8, 8.0)
        drawing = figure(width, 9.6)
        labels = None if tokens is None else [_drawable(token) for token in tokens]
        maps, rows, strips = drawing.subfigures(3, 1)
        titled = [(f"prior, head {head}{average}", prior)]
        titled += [(f"posterior, channel {channel}", posterior[..., at]) for at, channel in enumerate(channels)]
        _draw_maps(maps, titled, row, labels, width)
        _draw_channels(rows, prior[row], at_row, head, row, labels, width)
        _draw_strips(strips, {name: getattr(self, name)[batch, head] for name in STRIPS}, labels, width)
        drawing.savefig(path, format="png")

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `femixer inspect`, for this mixer and the first sequence of the batch."""
        from femixer.inspection.page import embedded

        return embedded(self)


def inspect_mixer(
    mixer: FreeEnergyMixer, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
) -> Inspection:
    if x.dim() == 3 and x.shape[1] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} has no token to inspect; choose at least one")
    with torch.no_grad():
        (inputs, v, lam_logits, gate_logits, _), layout = mixer.prepare(x, mask, segments)

        def per_head(t: Tensor) -> Tensor:
            """[B, T, heads or kv_heads, D] -> [B, H, T, D] in float64"""
            return t.double().repeat_interleave(mixer.heads // t.shape[2], 2).transpose(1, 2)

        value, reads_free = per_head(v), "L" in mixer.parts
        found = inspect_read(
            lambda rows: mixer.prior.weights(inputs, layout, rows),
            value,
            mixer.beta_max if reads_free else None,
            torch.full_like(value, reads_free) if lam_logits is None else per_head(temperature_gate(lam_logits)),
            torch.ones_like(value) if gate_logits is None else per_head(outer_gate(gate_logits)),
            x.dtype,
            over_index=per_head(mixer.prior.over_index(v)),
            over_tokens=mixer.prior.over_tokens,
            readout=mixer.readout,
        )
    pairs, normalized = mixer.prior.one_temperature, getattr(mixer.prior, "normalize", True)
    beta_max = mixer.beta_max.detach().float().cpu()
    return replace(found, layer=Layer("mixer", mixer.prior_name, mixer.parts, pairs, normalized, beta_max))


def inspect_read(
    weights: Callable[[Tensor], Tensor],
    value: Tensor,
    beta_max: Tensor | None,
    lam: Tensor,
    gate: Tensor,
    dtype: torch.dtype,
    *,
    over_index: Tensor | None = None,
    over_tokens: Callable[[Tensor], Tensor] = lambda p: p,
    readout: str = "free_energy",
) -> Inspection:
    """The inspection, in `dtype`, of a read of value [B, H, T, D] with beta_max [H, D], None for the mean.

    weights: the prior of the queries with the given numbers. over_index, over_tokens: as in femixer.priors.base, where
    the prior is not over tokens. All in float64.
    """
    over_index = value if over_index is None else over_index
    beta = 0.0 if beta_max is None else beta_max.double()[:, None]

    def prior(rows: Tensor) -> Tensor:
        p = weights(rows)
        return p.expand(value.shape[0], *p.shape[1:])  # one that does not look at the tokens is that of all sequences

    @torch.no_grad()
    def posteriors(rows: Tensor) -> Tensor:
        return over_tokens(posterior(prior(rows), over_index, beta))

    def block(rows: Tensor) -> dict[str, Tensor]:
        """What some of the queries read."""
        p = prior(rows)
        mean, free = (free_energy(p, over_index, each) for each in (0.0, beta))
        here = lam[:, :, rows]
        hidden = torch.zeros_like(here) if beta_max is None else hidden_temperature(p, over_index, beta, here)
        total = p.sum(3, keepdim=True)
        normalized = p / torch.where(total > 0, total, 1.0)
        result = {
            "prior": over_tokens(p),
            "mean": mean,
            "free_energy": free,
            "posterior_mean": torch.einsum("bhtsd,bhsd->bhtd", posterior(p, over_index, beta), over_index),
            "hidden_beta": hidden,
            "kl": kl_divergence(posterior(p, over_index, hidden), normalized).clamp(min=0),
        }
        result["read"] = torch.lerp(mean, result[readout], here)
        return {name: t.to(dtype) for name, t in result.items()}

    length = value.shape[2]
    first = over_tokens(prior(torch.zeros(1, dtype=torch.long, device=value.device)))
    check_bytes(first.numel() * length * dtype.itemsize, length, "prior")
    found: dict[str, Tensor] = {}
    for some in blocks(length, over_index):
        for name, part in block(some).items():
            if name not in found:
                found[name] = part.new_empty(*part.shape[:2], length, *part.shape[3:])
            found[name][:, :, some] = part
    own: dict[str, Any] = {"value": value.to(dtype), "lam": lam.to(dtype), "gate": gate.to(dtype), **found}
    return Inspection(**own, _posteriors=posteriors)


def blocks(count: int, numbers: Tensor) -> Sequence[Tensor]:
    """The queries below `count`, few enough at a time where so many numbers are behind each."""
    places = torch.arange(count, device=numbers.device)
    return places.split(max(1, MOST_NUMBERS // max(1, numbers.numel())))


def check_bytes(count: int, tokens: int, what: str) -> None:
    if count > LARGEST:
        raise ValueError(
            f"the {what} of {tokens} tokens would take {count / 1e9:.1f} GB; allowed are {LARGEST / 1e9:.1f}: inspect "
            "fewer tokens or sequences at a time"
        )


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The mixers of a model by name, one per layer: modules with a method `inspect`, and baselines, called "mixer"."""
    mixers = {name: m for name, m in model.named_modules() if name.endswith("mixer") or hasattr(m, "inspect")}
    if not any(hasattr(m, "inspect") for m in mixers.values()):
        why = "it has no FreeEnergyMixer (models of `femixer upgrade` have none)"
        raise ValueError(f"model={type(model).__name__} cannot be inspected: {why}")
    return mixers


def inspect_model(model: nn.Module, *args: Any, only: Collection[int] | None = None, **kwargs: Any) -> Iterator[Layer]:
    """Run `model(*args, **kwargs)` once and inspect its mixers on the inputs that they had there.

    Every mixer of the model is in the result, in order; without an inspection if it is a baseline or not among the
    numbers in `only`. The model runs at once; inspections, large for long texts, are computed one by one.
    """
    mixers = mixers_of(model)
    inputs: dict[str, dict[str, Any]] = {}

    def keep(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            bound = signature(module.forward).bind(*given, **named).arguments
            inputs[name] = {key: bound[key] for key in ("x", "mask", "segments") if bound.get(key) is not None}

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [keep(name, m) for name, m in mixers.items() if hasattr(m, "inspect")]
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()

    def layers() -> Iterator[Layer]:
        for number, (name, mixer) in enumerate(mixers.items()):
            if name in inputs and (only is None or number in only):
                yield layer_of(mixer.inspect(**inputs[name]), name)  # type: ignore[operator]
            else:
                why = "not chosen" if name in inputs else "a baseline, which cannot be inspected"
                yield Layer(name, getattr(mixer, "prior_name", type(mixer).__name__), missing=why)

    return layers()


def layer_of(inspection: Inspection, name: str = "mixer") -> Layer:
    """The layer of one inspection, with it."""
    if inspection.layer is None:
        raise ValueError("inspection.layer=None is not allowed; choose an inspection made by mixer.inspect")
    return replace(inspection.layer, name=name, inspection=inspection)


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
