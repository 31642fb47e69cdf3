"""Models by name."""

from __future__ import annotations

from typing import Any

from femixer.models.config import FEMConfig

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


def preset(name: str, **overrides: Any) -> FEMConfig:
    """The configuration of a preset, with other fields of FEMConfig as given."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return FEMConfig(**{**PRESETS[name], **overrides})
