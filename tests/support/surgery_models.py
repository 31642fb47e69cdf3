"""Small models of every family that surgery knows, and their inputs."""

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    DeiTForImageClassification,
)

from femixer.surgery import upgrade

WIDTHS = {"hidden_size": 42, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 6}


TEXT = WIDTHS | {
    "num_key_value_heads": 6,
    "vocab_size": 97,
    "max_position_embeddings": 71,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


IMAGES = WIDTHS | {"image_size": 15, "patch_size": 5, "num_labels": 7}


# What makes a family's attention its own: grouped heads, windows, widths, scales, rotations, norms.
OWN = {
    "cohere": {"use_qk_norm": True},
    "gemma": {"num_key_value_heads": 1, "head_dim": 10},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "granite": {"attention_multiplier": 0.3, "num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2, "hidden_size": 36},  # rotary widths are even
    "mistral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    "opt": {"ffn_dim": 53, "word_embed_proj_dim": 42},
    "phi3": {"num_key_value_heads": 3, "hidden_size": 48, "sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 3, "head_dim": 10},
    "starcoder2": {"num_key_value_heads": 2},
}


EVEN = ("cohere", "gpt_neox", "granite", "olmo2", "phi", "qwen2", "smollm3", "stablelm", "starcoder2")


VISION = ("deit", "dinov2", "vit")


ENCODERS = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


def build(family: str, **changes: object) -> nn.Module:
    """A random model with weights large enough that every part of it matters."""
    torch.manual_seed(7)
    sizes = IMAGES if family in VISION else TEXT | ({"hidden_size": 48} if family in EVEN else {})
    if family == "distilbert":
        sizes |= {"dim": 42, "hidden_dim": 53, "n_layers": 2, "n_heads": 6}
    config = CONFIG_MAPPING[family](**(sizes | OWN.get(family, {}) | changes))
    auto = AutoModelForCausalLM
    if family in ENCODERS:
        auto = AutoModelForMaskedLM
    elif family in VISION:
        auto = AutoModelForImageClassification
    # Auto has two classes for a DeiT and needs to be told which one.
    model = DeiTForImageClassification(config) if family == "deit" else auto.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.data *= 4
    return model.eval()


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Images, or tokens with padding: left for decoders, right for encoders."""
    if family in VISION:
        return {"pixel_values": torch.randn(3, 3, 15, 15)}
    padding = torch.arange(17) < torch.tensor([0, 4, 11])[:, None]
    if family in ENCODERS:
        padding = padding.flip(1)
    ids = torch.randint(3, 97, (3, 17)).masked_fill(padding, 0)
    return {"input_ids": ids, "attention_mask": (~padding).long()}


def open_gates(model: nn.Module) -> nn.Module:
    """Temperatures and gates far from their start."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("lam_max"):
            parameter.data.uniform_(0.3, 1)
        elif ".fem." in name:
            parameter.data += torch.randn_like(parameter) * (1.0 if name.endswith("raw_beta") else 0.2)
    return model


def upgraded(family: str, parts: str = "LTG", **changes: object) -> nn.Module:
    return open_gates(upgrade(build(family, **changes), parts, rank=5))
