"""Putting FEM into a transformers model: those that can be upgraded, a class for each of their classes that builds them
upgraded, and loading models from folders.

LlamaForCausalLM becomes FEMLlamaForCausalLM with the configuration FEMLlamaConfig of type "fem_llama": transformers
alone does not mistake a saved folder for a Llama, and with this module imported its Auto classes load it.
"""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from femixer.damage import Damaged, reading
from femixer.models.files import OtherKind, load_all, only_local, why_not_found
from femixer.models.language import FEMPreTrainedModel
from femixer.options import check
from femixer.surgery import attention
from femixer.surgery.attention import PARTS, ReadGates

# Model types that read a text from both sides, unless their configuration says is_decoder.
ENCODERS = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
# Those that can be upgraded.
FAMILIES = (
    *ENCODERS,
    *("cohere", "gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt", "phi", "phi3"),
    *("qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
    *("deit", "dinov2", "vit"),
)
PREFIX = "fem_"


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
    # BertSelfAttention for BertConfig and FEMBertConfig, LlamaAttention for LlamaConfig.
    kind = "SelfAttention" if config.model_type.removeprefix(PREFIX) in ENCODERS else "Attention"
    name = type(config).__name__.removeprefix("FEM").removesuffix("Config") + kind
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    # GPT-2's attention to an encoder is of the same class.
    own = [m for m in model.modules() if type(m).__name__ == name and not getattr(m, "is_cross_attention", False)]
    sizes = (config.hidden_size, heads, kv_heads, width, config.fem_parts, config.fem_rank)
    for module in own:
        module.fem = ReadGates(*sizes, device=next(module.parameters()).device, dtype=model.dtype)
        module.register_forward_pre_hook(attention.hand_over_states, with_kwargs=True)
    for asked in {model, model.base_model}:
        asked.register_forward_pre_hook(attention.refuse_weights, with_kwargs=True)


def upgraded_config(base: Any) -> Any:
    """LlamaConfig -> FEMLlamaConfig, with the parts of FEM and the rank of the gates as fields."""
    kinds = {"fem_parts": str, "fem_rank": int}
    defaults = {"model_type": PREFIX + base.model_type, "fem_parts": PARTS[0], "fem_rank": 16}
    return _class(base, (base,), {"__annotations__": kinds, **defaults})


def upgraded_class(base: Any) -> Any:
    """LlamaForCausalLM -> FEMLlamaForCausalLM"""
    upgraded = _class(base, (Upgraded, base), {"config_class": upgraded_config(base.config_class)})
    conversions = get_checkpoint_conversion_mapping(base.__name__)
    if conversions:  # files have other names than modules, as in ViT; a class is looked up by its name
        register_checkpoint_conversion_mapping(upgraded.__name__, conversions, overwrite=True)
    # Where transformers looks up which outputs it can record; a constructor would enter it, a change of class does not.
    _CAN_RECORD_REGISTRY[str(upgraded)] = base._can_record_outputs
    return upgraded


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
        if (writes := modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).get(model_type):  # see femixer.models
            writes[config.model_type] = f"FEM{writes[model_type]}"


def upgrade(model: Any, parts: str = "LT", rank: int = 16) -> Any:
    """Replace the attention's read in `model` by FEM, in place, and return the model. It computes the same at first.

    All trained weights are kept; every self-attention gains the parameters of `attention.ReadGates` as its child `fem`.
    parts: "LT" free energy and temperature gate, "LTG" also the outer gate. rank: of the maps from hidden
    states to gates.
    """
    check_upgradable(model)
    check_parts(parts)
    check(isinstance(rank, int) and 1 <= rank <= model.config.hidden_size, "rank", rank, "1 to the hidden size")
    old, new = model.config, copy.deepcopy(model.config)  # another model may have the same configuration object
    new.__class__ = upgraded_config(type(old))
    new.fem_parts, new.fem_rank = parts, rank
    new._attn_implementation = attention.NAME
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    model.__class__ = upgraded_class(type(model))
    # Saving would translate names back to those that the original was loaded from, whatever they were.
    model.__dict__.pop("_weight_conversions", None)
    attach(model)
    return model


def check_upgradable(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, not {type(model).__name__}")
    if isinstance(model, Upgraded):
        raise ValueError(f"model is upgraded already, with parts={model.config.fem_parts!r}")
    if (kind := model.config.model_type) not in FAMILIES:
        raise ValueError(f"model type {kind!r} cannot be upgraded; known are {', '.join(FAMILIES)}")
    if model.config.output_attentions:
        raise ValueError("model.config.output_attentions=True: FEM reads every channel with weights of its own")
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(f"{type(model).__name__} is not a class of transformers; upgrade the model inside it")


def check_parts(parts: str) -> None:
    """L alone would change what the model computes; C would need a state that transformers' caches do not carry."""
    why = "L without T changes what the model computes, C needs a state that its cache does not carry"
    check(parts in PARTS, "parts", parts, f"{' or '.join(PARTS)}: {why}")


def load(path: str | Path, **options: Any) -> Any:
    """Load the model in a folder (or of a name on the hub) in the class that was saved: upgraded or not, or femixer's.

    Safetensors only, and all weights must be there. options: those of transformers' from_pretrained, such as dtype and
    device_map.
    """
    from femixer import models

    options = {**only_local(path), **options}
    if not Path(path).is_dir():
        try:  # that the hub has a model of this name, or its files were loaded before
            huggingface_hub.hf_hub_download(str(path), "config.json", local_files_only=options["local_files_only"])
        except Exception as error:  # the hub's client has many
            raise ValueError(f"model={str(path)!r} is not there: {why_not_found(path)}") from error
    with reading(path):
        config = AutoConfig.from_pretrained(path, **only_local(path))
        name = (config.architectures or [""])[0]
        kinds = [globals().get(name), *(getattr(module, name, None) for module in (models, transformers))]
    kind: Any = next((x for x in kinds if isinstance(x, type) and issubclass(x, PreTrainedModel)), None)
    if kind is None:
        raise ValueError(f"{path} has a model of class {name!r}, which neither transformers nor femixer knows")
    if issubclass(kind, Upgraded | FEMPreTrainedModel):
        return kind.from_pretrained(path, **options)
    # Whoever saved it may have kept parts that this class does not use.
    return load_all(kind.from_pretrained, path, kind, False, options, spare=True)[0]


def check_ends(folder: str | Path, model: Any) -> None:
    """Raise a ValueError unless the tokens that begin, end and pad a text are some of the vocabulary, or none."""
    rows = model.get_input_embeddings().weight.shape[0]
    for file, config in (("generation_config.json", model.generation_config), ("config.json", model.config)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            given = getattr(config, name, None)
            for token in given if isinstance(given, list) else [given]:
                fits = token is None or (type(token) is int and 0 <= token < rows)
                check(fits, f"{Path(folder) / file}: {name}", token, f"a token below {rows}, or null")
