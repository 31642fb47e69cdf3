"""A whole model read once, and what every mixer in it read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from femixer.inspection.inspection import Inspection


@dataclass(frozen=True)
class Layer:
    """One mixer of a model and what it read; a mixer that has no `inspect` is there without an inspection."""

    name: str  #: the mixer's name in the model
    prior: str  #: the prior's name, or the mixer's class where it has none
    parts: str = ""
    pairs: bool = False  #: the prior weighs pairs of token and channel, and is shown summed over channels
    normalized: bool = True  #: False: the mixer reads with weights that do not sum to one
    beta_max: Tensor | None = None  #: [H, D]
    inspection: Inspection | None = None
    missing: str = ""  #: why there is no inspection


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The mixers of a model by name, one per layer: modules with a method `inspect`, and baselines, called "mixer"."""
    mixers = {name: m for name, m in model.named_modules() if name.endswith("mixer") or hasattr(m, "inspect")}
    if not any(hasattr(m, "inspect") for m in mixers.values()):
        raise ValueError(f"model={type(model).__name__} cannot be inspected: it has no FreeEnergyMixer")
    return mixers


def inspect_model(model: nn.Module, *args: Any, only: Collection[int] | None = None, **kwargs: Any) -> Iterator[Layer]:
    """Run `model(*args, **kwargs)` once and inspect its mixers on the inputs that they had there.

    Every mixer of the model is in the result, in order; without an inspection if it is a baseline or not among the
    numbers in `only`. The model runs now; inspections, large for a long text, are made as they are asked for.
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
    return (
        _layer(name, m, inputs.get(name), only is None or number in only)
        for number, (name, m) in enumerate(mixers.items())
    )


def _layer(name: str, mixer: Any, inputs: dict[str, Any] | None, wanted: bool) -> Layer:
    prior = getattr(mixer, "prior_name", type(mixer).__name__)
    if inputs is None or not wanted:
        return Layer(name, prior, missing="not chosen" if inputs else "a baseline, which cannot be inspected")
    return layer_of(name, mixer.inspect(**inputs))


def layer_of(name: str, inspection: Inspection) -> Layer:
    """The layer of one inspection, whose `reader` says which mixer it is."""
    reader = inspection.reader
    if reader is None:
        raise ValueError("inspection.reader=None is not allowed; choose an inspection made by mixer.inspect")
    about = (reader.prior, reader.parts, reader.pairs, reader.normalized, reader.beta_max)
    return Layer(name, *about, inspection=inspection)
