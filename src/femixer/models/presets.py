"""Models by name."""

from __future__ import annotations

from typing import Any

from femixer.models.config import FEMConfig
from femixer.models.vision import FEMVisionConfig

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
