"""Weights from a folder, all of them: what transformers would fill with random numbers, or leave out, is an error."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from femixer.models.quiet import without_reports

# Modules over a text model's body, by the names they have in one model or the other.
HEADS = ("lm_head", "score")


def load_all(
    load: Callable[..., Any], path: Any, model_type: str, allow_missing: bool | Sequence[str], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(model, what transformers says of loading it) by `load`, a from_pretrained of transformers.

    The weights must have every parameter and nothing else, of the right shapes and finite, and config.json must be of
    this model_type. allow_missing: True, or patterns of names ("classifier.*"), for what may start anew. A new head
    (`model.new_head`) over a body that was saved with another one is allowed, and a warning names it.
    """
    if options.setdefault("use_safetensors", True) is not True:
        raise ValueError(f"use_safetensors={options['use_safetensors']!r} is not allowed; choose True")
    if "config" not in options:
        check_kind(path, model_type, options)
    resized = options.pop("ignore_mismatched_sizes", False) or allow_missing is True
    with without_reports():
        model, info = load(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    patterns = ["*"] if allow_missing is True else [*(allow_missing or ())]
    missing = [name for name in sorted(info["missing_keys"]) if not any(fnmatch.fnmatch(name, p) for p in patterns)]
    # A body is loaded from the whole model too.
    spare = allow_missing is True or getattr(model, "is_body", False)
    unexpected = [] if spare else sorted(info["unexpected_keys"])
    missing, unexpected = _with_new_head(model, path, missing, unexpected)
    misshapen = [] if resized else sorted(_shapes(x) for x in info["mismatched_keys"])
    for what, names in (("lack", missing), ("have too many:", unexpected), ("have other shapes:", misshapen)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{path} does not fit its config.json: the weights {what} {', '.join(names[:3])}{more} "
                "(from_pretrained(..., allow_missing=True) loads what fits and starts the rest anew)"
            )
    check_finite(model, path)
    return model, info


def _with_new_head(model: Any, path: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """What is still missing and left over, if the head starts anew and those of other models are left out."""
    head = [name for name, _ in model.named_parameters() if name.split(".")[0] in getattr(model, "new_head", ())]
    if not head or not {*head} <= {*missing}:  # a part of a head is a broken file
        return missing, unexpected
    others = [name for name in unexpected if name.split(".")[0] in HEADS]
    left_out = f"; {', '.join(others)} of another head left out" if others else ""
    warnings.warn(f"{path} has no {', '.join(sorted(head))}: new, to be trained before use{left_out}", stacklevel=5)
    return [name for name in missing if name not in head], [name for name in unexpected if name not in others]


def _shapes(found: Any) -> str:
    """transformers names a weight, the shape on disk and that of the model, or the weight alone."""
    if isinstance(found, str):
        return found
    name, there, wanted = found
    return f"{name} {tuple(there)} instead of {tuple(wanted)}"


def check_kind(path: Any, model_type: str, options: dict[str, Any]) -> None:
    """Raise a ValueError unless the folder's configuration is of this model_type."""
    known = {name: options[name] for name in ("revision", "subfolder", "token", "cache_dir") if name in options}
    local = options.get("local_files_only", False)
    found, _ = PreTrainedConfig.get_config_dict(path, local_files_only=local, **known)
    kind = found.get("model_type")
    if kind != model_type:
        raise ValueError(f"{path}: config.json has model_type={kind!r}; this class loads {model_type!r}")


def check_finite(model: nn.Module, path: Any) -> None:
    """Raise a ValueError that names a weight which is not finite."""
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or type(weight.data) is not torch.Tensor:
            continue  # elsewhere (offloaded), or not numbers but codes (quantized)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{path}: the weight {name} is not finite (NaN or infinite)")
