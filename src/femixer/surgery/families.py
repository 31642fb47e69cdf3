"""The transformers models that can be upgraded, and a class for each of their classes that builds them upgraded.

LlamaForCausalLM becomes FEMLlamaForCausalLM with the configuration FEMLlamaConfig of type "fem_llama": transformers
alone does not mistake a saved folder for a Llama, and with this module imported its Auto classes load it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from femixer.damage import Damaged
from femixer.models.files import OtherKind, load_all
from femixer.options import check
from femixer.surgery import attention
from femixer.surgery.attention import PARTS, ReadGates

# model type: class of its self-attention
FAMILIES = {
    "bert": "BertSelfAttention",
    "camembert": "CamembertSelfAttention",
    "cohere": "CohereAttention",
    "deit": "DeiTAttention",
    "dinov2": "Dinov2Attention",
    "distilbert": "DistilBertSelfAttention",
    "electra": "ElectraSelfAttention",
    "gemma": "GemmaAttention",
    "gpt2": "GPT2Attention",
    "gpt_neox": "GPTNeoXAttention",
    "granite": "GraniteAttention",
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "olmo2": "Olmo2Attention",
    "opt": "OPTAttention",
    "phi": "PhiAttention",
    "phi3": "Phi3Attention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "roberta": "RobertaSelfAttention",
    "smollm3": "SmolLM3Attention",
    "stablelm": "StableLmAttention",
    "starcoder2": "Starcoder2Attention",
    "vit": "ViTAttention",
    "xlm-roberta": "XLMRobertaSelfAttention",
}
PREFIX = "fem_"
# Families that read a text from both sides, unless their configuration says is_decoder.
ENCODERS = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


class Upgraded:
    """What the upgraded class adds to the transformers class behind it in the order of inheritance."""

    config: Any
    config_class: type[PreTrainedConfig]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, self.config_class):
            raise TypeError(f"config must be a {self.config_class.__name__}, not {type(config).__name__}")
        config._attn_implementation = attention.NAME
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attach(self)

    # Names that heads have in the families, besides those of femixer's own models.
    other_heads = ("cls", "predictions", "pooler", "classifier", "qa_outputs", "vocab_transform", "vocab_projector")

    @property
    def new_head(self) -> tuple[str, ...]:
        """Modules over the body, which may be new if all of them are: not those that write text."""
        model: Any = self
        if model.can_generate() or model.base_model is model:
            return ()
        return tuple(name for name, _ in model.named_children() if name != model.base_model_prefix)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        allow_missing: bool | Sequence[str] = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but from safetensors only, and only an upgraded model whose weights are all there: see
        `femixer.models.files.load_all`."""
        load = functools.partial(super().from_pretrained, *args)  # type: ignore[misc]
        try:
            model, info = load_all(load, pretrained_model_name_or_path, cls, allow_missing, kwargs)
        except Damaged as error:
            if not isinstance(error, OtherKind) and ".fem." not in str(error):
                raise
            raise Damaged(f"{error}: not an upgraded model; femixer.surgery.upgrade makes one") from None
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *_: Any, **__: Any) -> None:
        allowed = f"{attention.NAME!r}: another one would read without FEM"
        check(attn_implementation == attention.NAME, "attn_implementation", attn_implementation, allowed)


def attach(model: Any) -> None:
    """Give every self-attention of a model with an upgraded configuration its gates, as a child called `fem`."""
    config = model.config
    name = FAMILIES[config.model_type.removeprefix(PREFIX)]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    # GPT-2's attention to an encoder is of the same class.
    own = [m for m in model.modules() if type(m).__name__ == name and not getattr(m, "is_cross_attention", False)]
    for module in own:
        made = {"device": next(module.parameters()).device, "dtype": model.dtype}
        sizes = (config.hidden_size, heads, kv_heads, width)
        module.fem = ReadGates(*sizes, config.fem_parts, config.fem_rank, **made)
        module.register_forward_pre_hook(attention.hand_over_states, with_kwargs=True)


def upgraded_config(base: Any) -> Any:
    """LlamaConfig -> FEMLlamaConfig, with the parts of FEM and the rank of the gates as fields."""
    fields = {
        "__annotations__": {"fem_parts": str, "fem_rank": int},
        "model_type": PREFIX + base.model_type,
        "fem_parts": PARTS[0],
        "fem_rank": 16,
    }
    return _class(base, (base,), fields)


def upgraded_class(base: Any) -> Any:
    """LlamaForCausalLM -> FEMLlamaForCausalLM"""
    made = _class(base, (Upgraded, base), {"config_class": upgraded_config(base.config_class)})
    conversions = get_checkpoint_conversion_mapping(base.__name__)
    if conversions:  # files have other names than modules, as in ViT; a class is looked up by its name
        register_checkpoint_conversion_mapping(made.__name__, conversions, overwrite=True)
    # Where transformers looks up which outputs it can record; a constructor would enter it, a change of class does not.
    _CAN_RECORD_REGISTRY[str(made)] = base._can_record_outputs
    return made


def _class(base: type, bases: tuple[type, ...], fields: dict[str, Any]) -> Any:
    """FEM + the name of `base`, once, and as an attribute of this module, where pickle looks for it."""
    name = f"FEM{base.__name__}"
    if name not in globals():
        globals()[name] = type(name, bases, {"__module__": __name__, **fields})
    return globals()[name]


def register() -> None:
    """Make the Auto classes know the upgraded models: each Auto class that has a class for the family gets ours."""
    autos = [x for name, x in vars(modeling_auto).items() if name.startswith("AutoModel") and hasattr(x, "register")]
    for model_type in FAMILIES:
        base = CONFIG_MAPPING[model_type]
        config = upgraded_config(base)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto in autos:
            known = auto._model_mapping.get(base, None)
            if isinstance(known, tuple):  # of which the configuration's `architectures` chooses
                auto._model_mapping.register(config, tuple(upgraded_class(x) for x in known), exist_ok=True)
            elif known is not None:
                auto.register(config, upgraded_class(known), exist_ok=True)
