"""The mixer of a layer, as the configuration names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from femixer.baselines import Attention
from femixer.mixer import FreeEnergyMixer
from femixer.priors import prior_class

if TYPE_CHECKING:
    from femixer.models.config import FEMConfig

MIXERS = ("fem", "attention")


def check_mixer(config: FEMConfig, layer: int) -> None:
    """Raise a ValueError that names the field, unless the layer's mixer and prior are known and their options used."""
    name = config.at("mixer", layer)
    if name not in MIXERS:
        raise ValueError(f"mixer={name!r} is unknown; choose one of {', '.join(MIXERS)}")
    prior_class(config.at("prior", layer))
    if config.window is not None and config.at("prior", layer) == "softmax" and name != "fem":
        raise ValueError(f"window={config.window!r} does not fit mixer={name!r}; only mixer='fem' has windows")
    used = {config.at("prior", layer) for layer in range(config.num_hidden_layers)}
    for prior, options in (config.prior_options or {}).items():
        if prior not in used or not isinstance(options, dict):
            raise ValueError(
                f"prior_options={config.prior_options!r} must give options per prior of the model, "
                f"as {{{min(used)!r}: {{...}}}}; its priors are {', '.join(sorted(used))}"
            )


def build_mixer(config: FEMConfig, layer: int, causal: bool = True) -> nn.Module:
    shared: dict[str, Any] = {
        "dim": config.hidden_size,
        "heads": config.num_attention_heads,
        "causal": causal,
        "bias": config.mixer_bias,
        "dropout": config.mixer_dropout,
    }
    if config.at("mixer", layer) == "attention":
        rope = config.rope is not False
        return Attention(**shared, kv_heads=config.num_key_value_heads, rope=rope, rope_base=config.rope_base)
    prior = config.at("prior", layer)
    options = dict((config.prior_options or {}).get(prior, {}))
    if prior_class(prior).queries_and_keys:
        options.setdefault("rope_base", config.rope_base)
        shared.update(kv_heads=config.num_key_value_heads, rope=config.rope)
    if prior == "softmax":
        shared["window"] = config.window
    return FreeEnergyMixer(
        **shared,
        prior=prior,
        parts=config.parts,
        budget=config.budget,
        prior_options=options,
    )
