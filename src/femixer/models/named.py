"""Models by name: sizes (presets), the rows of the paper's tables as fields of FEMConfig, and how large they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM
from femixer.models.vision import FEMForImageClassification, FEMVisionConfig

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
    "AFT": fem("aft", ""),
    "FEM-AFT": fem("aft"),
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
    """The configuration of a preset, an FEMConfig or an FEMVisionConfig, with other fields of it as given."""
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
