"""Models by name: sizes (presets), the rows of the paper's tables as fields of FEMConfig, their numbers of parameters,
and options that a row leaves open, which all tasks have on their command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import nn

from femixer.mixer import PARTS
from femixer.models.block import options_of
from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM
from femixer.models.vision import FEMForImageClassification, FEMVisionConfig
from femixer.options import check, given
from femixer.priors import prior_class, value_of

Fields = dict[str, Any]


def fem(prior: str, parts: str = "CLTG", **options: Any) -> Fields:
    fields: Fields = {"mixer": "fem", "prior": prior, "parts": parts}
    return fields | ({"prior_options": {prior: options}} if options else {})


def baseline(mixer: str, **options: Any) -> Fields:
    return {"mixer": mixer} | ({"mixer_options": {mixer: options}} if options else {})


FEW = 4
"""Heads of rivals whose memory is one matrix per head. They are published with few wide ones; with attention's many
narrow heads they could tell only as many keys apart as a head has channels."""

NAMED: dict[str, Fields] = {
    "SMAttn": baseline("attention"),
    "SMAttn+C": fem("softmax", "C"),
    "SMAttn+C,L": fem("softmax", "CL"),
    "SMAttn+C,L,T": fem("softmax", "CLT"),
    "FEM-SM": fem("softmax"),
    "SMAttn+C,G": fem("softmax", "CG"),
    "SMAttn+L": fem("softmax", "L"),
    "SMAttn+L,T": fem("softmax", "LT"),
    "SMAttn+L,T,G": fem("softmax", "LTG"),
    "FoX": fem("fox", ""),
    "FEM-FoX": fem("fox"),
    "GLA": fem("gla", ""),
    "GLA+C": fem("gla", "C"),
    "GLA+C,L": fem("gla", "CL"),
    "GLA+C,L,T": fem("gla", "CLT"),
    "FEM-GLA": fem("gla"),
    "GLA+C,G": fem("gla", "CG"),
    "Mamba": fem("mamba", ""),
    "FEM-Mamba(-norm)": fem("mamba", normalize=False),
    "FEM-Mamba": fem("mamba"),
    "Mamba+C,G": fem("mamba", "CG"),
    "AFT": fem("aft", ""),
    "FEM-AFT": fem("aft"),
    "AFT+C,G": fem("aft", "CG"),
    "Hyena": baseline("hyena"),
    "DeltaNet": baseline("deltanet", heads=FEW),
    "LinAttn": baseline("linear-attention"),
    "LinAttn-learned": baseline("linear-attention", feature_map="learned"),
    "Mamba2": baseline("mamba2"),
    "GatedDeltaNet": baseline("gated-deltanet", heads=FEW),
    "DiffTrans": baseline("diff-transformer"),
    "GatedAttn": baseline("gated-attention"),
    "FoX-published": baseline("fox"),
    "PaTH": baseline("path"),
    "KDA": baseline("kda", heads=FEW),
    "RetNet": baseline("retnet", heads=FEW),
    "TNN": baseline("tnn"),
    "HGRN": baseline("hgrn"),
    "HGRN2": baseline("hgrn2", heads=FEW),
    "GSA": baseline("gsa"),
    "GSA-64": baseline("gsa", heads=FEW, slots=64),
    "RWKV6": baseline("rwkv6", heads=FEW),
    "RWKV7": baseline("rwkv7", heads=FEW),
    "LASER": baseline("laser"),
    "GLA-published": baseline("gla", heads=FEW),
    "AFT-published": baseline("aft"),
    "Mamba-published": baseline("mamba"),
}
"""FoX, GLA, AFT and Mamba are our normalized priors with the mean as read; the published layers are named so."""


# The two large ones have the sizes of the paper's language models. It follows the experiments of
# flash-linear-attention, whose transformers these are, with LLaMA-2's 32,000 tokens and sequences of 4096.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256},
    "mini": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 512},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 1024},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048},
    "340m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 4096},
    "1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "max_position_embeddings": 4096},
}

# The vision models of the paper's ImageNet experiment (Touvron et al., 2021), and one for scikit-learn's digits.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "deit-tiny": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "num_labels": 1000},
    "deit-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "num_labels": 1000},
    "digits": {
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_labels": 10,
    },
}


def preset(name: str, **overrides: Any) -> Any:
    """The configuration of a preset, an FEMConfig or FEMVisionConfig, with the fields given changed."""
    if name in PRESETS:
        return FEMConfig(**{**PRESETS[name], **overrides})
    if name in VISION_PRESETS:
        return FEMVisionConfig(**{**VISION_PRESETS[name], **overrides})
    raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join((*PRESETS, *VISION_PRESETS))}")


def parameter_count(config: FEMConfig | FEMVisionConfig) -> int:
    """Of the language model or the image classifier, without making it."""
    with torch.device("meta"):  # nothing is stored, so the large ones are counted as quickly as the small ones
        if isinstance(config, FEMVisionConfig):
            return FEMForImageClassification(config).num_parameters()
        return FEMForCausalLM(config).num_parameters()


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def sizes_of(width: int | None, layers: int | None, heads: int | None) -> Fields:
    """Fields of a configuration: those that are given."""
    return given(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)


FIELDS = {"temperature": "mixer_temperature"}
"""Names in FEMConfig, where they are others."""
NEEDS = {
    "start": "a free energy mixer",
    "readout": "a free energy mixer with L",
    "temperature": "a free energy mixer with L",
    "budget": "a free energy mixer with queries and keys",
    "value_dim": "a free energy mixer",
}


@dataclass(frozen=True)
class Mixing:
    """Options of FreeEnergyMixer that the rows of the paper's tables do not fix."""

    start: Literal["paper", "prior"] | None = None
    """Initialization: paper, all projections N(0, 0.02) (the default); prior, as the prior's mean read."""
    readout: Literal["free_energy", "posterior_mean"] | None = None
    """Read of mixers with L: the free energy (the default), or the posterior mean at beta_max."""
    temperature: Literal["learned", "fixed"] | None = None
    """Inverse temperature of mixers with L: learned per channel (by default), or fixed at 1."""
    budget: Literal["attention", "balanced"] | None = None
    """Width of queries and keys: attention's (by default), or that of the values."""
    value_dim: int | None = None
    """Width of the values of free energy mixers, over all heads: by default what the budget gives.
    Queries and keys have the remaining parameters."""

    def fitting(self, row: Mapping[str, Any]) -> Self:
        """What fits a row (fields of FEMConfig), which may be a baseline, without L, or without queries and keys."""
        fem = "fem" in listed(row.get("mixer", "fem"))
        with_l = fem and "L" in row.get("parts", PARTS)
        with_keys = fem and any(prior_class(name).queries_and_keys for name in listed(row.get("prior", "softmax")))
        return replace(
            self,
            start=self.start if fem else None,
            readout=self.readout if with_l else None,
            temperature=self.temperature if with_l else None,
            budget=self.budget if with_keys else None,
            value_dim=self.value_dim if fem else None,
        )

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Of FEMConfig: what is given and fits a row."""
        return {FIELDS.get(name, name): value for name, value in given(**vars(self.fitting(row))).items()}

    def validate(self, *rows: Mapping[str, Any]) -> None:
        """Raise a ValueError if something is given that fits none of the rows."""
        for name, value in given(**vars(self)).items():
            used = any(getattr(self.fitting(row), name) is not None for row in rows)
            check(used, name, value, f"models of which one has {NEEDS[name]}")


def listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


FORMS = "option=value (slots=64 heads=4), or one JSON object ('{\"slots\": 64}')"


@dataclass(frozen=True)
class Rivals:
    """Options of the baselines among the models."""

    mixer_options: tuple[str, ...] = ()
    """Options of baselines (docs/baselines.md), for those models that take them:
    slots=64 heads=4, or as JSON '{"slots": 64}'."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Those that a row (fields of FEMConfig) with one mixer has itself."""
        own = (row.get("mixer_options") or {}).get(row["mixer"], {})
        return cls(tuple(f"{name}={value}" for name, value in own.items()))

    @property
    def values(self) -> dict[str, Any]:
        """Option -> value; the last one counts."""
        found: dict[str, Any] = {}
        for text in self.mixer_options:
            if text.lstrip().startswith("{"):
                try:
                    found |= dict(json.loads(text))
                except ValueError:
                    raise ValueError(f"mixer_options={text!r} is not allowed; choose {FORMS}") from None
                continue
            name, equals, value = text.partition("=")
            check(bool(name and equals and value), "mixer_options", text, FORMS)
            found[name] = value_of(value)
        return found

    def taken(self, mixer: str) -> dict[str, Any]:
        """Those that a mixer takes."""
        return {name: value for name, value in self.values.items() if name in options_of(mixer)}

    def fitting(self, row: Mapping[str, Any]) -> Self:
        """What the mixers of a row take."""
        taken = {name: value for mixer in mixers_of(row) for name, value in self.taken(mixer).items()}
        return replace(self, mixer_options=(json.dumps(taken),) if taken else ())

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`mixer_options` of FEMConfig: the row's own, changed by what is given and fits it; nothing where both are
        empty."""
        options = {mixer: dict(own) for mixer, own in (row.get("mixer_options") or {}).items()}
        for mixer in mixers_of(row):
            if taken := self.taken(mixer):
                options[mixer] = {**options.get(mixer, {}), **taken}
        return {"mixer_options": options} if options else {}

    def validate(self, *rows: Mapping[str, Any]) -> None:
        """Raise a ValueError if an option is given that no mixer of the rows takes."""
        known = {mixer: options_of(mixer) for row in rows for mixer in mixers_of(row) if options_of(mixer)}
        has = "; ".join(f"{mixer}: {', '.join(options)}" for mixer, options in known.items())
        for name in self.values:
            used = any(name in options for options in known.values())
            check(used, "mixer_options", name, f"options of the models' baselines ({has or 'there are none'})")


def mixers_of(row: Mapping[str, Any]) -> Sequence[str]:
    return [*dict.fromkeys(listed(row.get("mixer", "fem")))]
