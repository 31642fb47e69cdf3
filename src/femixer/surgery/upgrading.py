"""Putting FEM into a model, and loading models from folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from transformers import AutoConfig, PreTrainedModel

from femixer.damage import reading
from femixer.models.files import load_all, only_local, why_not_found
from femixer.models.language import FEMPreTrainedModel
from femixer.options import check
from femixer.surgery import attention, families
from femixer.surgery.attention import PARTS


def upgrade(model: Any, parts: str = "LT", rank: int = 16) -> Any:
    """Replace the attention's read in `model` by FEM, in place, and return it. Its function stays as it was.

    All trained weights are kept; every self-attention gains the parameters of `attention.ReadGates` as its child `fem`.
    parts: "LT" free energy and temperature gate, "LTG" also the outer gate. rank: of the maps from hidden
    states to gates.
    """
    check_upgradable(model)
    check_parts(parts)
    check(isinstance(rank, int) and 1 <= rank <= model.config.hidden_size, "rank", rank, "1 to the hidden size")
    old, new = model.config, copy.deepcopy(model.config)  # another model may have the same configuration object
    new.__class__ = families.upgraded_config(type(old))
    new.fem_parts, new.fem_rank = parts, rank
    new._attn_implementation = attention.NAME
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    model.__class__ = families.upgraded_class(type(model))
    # Saving would translate names back to those that the original was loaded from, whatever they were.
    model.__dict__.pop("_weight_conversions", None)
    families.attach(model)
    return model


def check_upgradable(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, not {type(model).__name__}")
    if isinstance(model, families.Upgraded):
        raise ValueError(f"model is upgraded already, with parts={model.config.fem_parts!r}")
    known = ", ".join(families.FAMILIES)
    if model.config.model_type not in families.FAMILIES:
        raise ValueError(f"model type {model.config.model_type!r} cannot be upgraded; known are {known}")
    if model.config.output_attentions:
        raise ValueError("model.config.output_attentions=True: FEM reads every channel with weights of its own")
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(f"{type(model).__name__} is not a class of transformers; upgrade the model inside it")


def check_parts(parts: str) -> None:
    """L alone would change what the model computes; C would need a state that transformers' caches do not carry."""
    why = "L without T changes what the model computes, C needs a state that its cache does not carry"
    check(parts in PARTS, "parts", parts, f"{' or '.join(PARTS)}: {why}")


def load(path: str | Path, **options: Any) -> Any:
    """The model in a folder (or of a hub name), in the class it was saved from: upgraded or not, or femixer's own.

    Safetensors only, and all weights must be there. options: those of transformers' from_pretrained, such as dtype and
    device_map.
    """
    from femixer import models

    options = {**only_local(path), **options}
    if not Path(path).is_dir():
        check_known(path, options["local_files_only"])
    with reading(path):
        config = AutoConfig.from_pretrained(path, **only_local(path))
        name = (config.architectures or [""])[0]
        kinds = [getattr(module, name, None) for module in (families, models, transformers)]
    kind: Any = next((x for x in kinds if isinstance(x, type) and issubclass(x, PreTrainedModel)), None)
    if kind is None:
        raise ValueError(f"{path} has a model of class {name!r}, which neither transformers nor femixer knows")
    if issubclass(kind, families.Upgraded | FEMPreTrainedModel):
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


def check_known(name: str | Path, local: bool) -> None:
    """Raise a ValueError unless the hub has a model of this name, or its files were loaded before."""
    try:
        huggingface_hub.hf_hub_download(str(name), "config.json", local_files_only=local)
    except Exception as error:  # the hub's client has many
        raise ValueError(f"model={str(name)!r} is not there: {why_not_found(name)}") from error
