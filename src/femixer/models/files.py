"""Models as files: loading complete weights and tokenizers from a folder or the Hugging Face hub; and what is saved
beside the weights: a module by which any tool finds our classes, and a model card."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from femixer.damage import Damaged, read_json, reading


@contextmanager
def without_bars() -> Iterator[None]:
    """Without the progress bars that transformers draws for every file, which would break up ours."""
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@contextmanager
def without_reports() -> Iterator[None]:
    """Without the long report of transformers on what it could not load; our error is one line."""
    was = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(was)


SECONDS = 5.0
hub_utils: Any = importlib.import_module("huggingface_hub.utils")


@functools.lru_cache(maxsize=1)
def is_offline() -> bool:
    """Whether the hub is unreachable. transformers would try it for one file after another, each several times."""
    if constants.HF_HUB_OFFLINE:
        return True
    try:
        hub_utils.get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # each version of the hub's client has other errors
        return True
    return False


def only_local(source: Any) -> dict[str, Any]:
    """Options of from_pretrained that load only local files: of a folder, or offline of what was loaded before."""
    return {"local_files_only": Path(source).is_dir() or is_offline(), "trust_remote_code": False}


def why_not_found(name: Any) -> str:
    """Why nothing was found under a name."""
    asked = "the hub does not answer, and it is not among what was loaded before" if is_offline() else "the hub says no"
    return f"there is no folder {str(name)!r}, and as a name on the hub: {asked}"


# Modules over a text model's body, by the names they have in one model or the other.
HEADS = ("lm_head", "score")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Numbers that a model may have beyond twice those in its file: what they take is filled before it is compared.
SPARE_NUMBERS = 10**8


class OtherKind(Damaged):
    """The folder of another kind of model."""


def load_all(
    load: Callable[..., Any],
    path: Any,
    kind: Any,
    allow_missing: bool | Sequence[str],
    options: dict[str, Any],
    spare: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Load a model by `load`, the from_pretrained of transformers for the class `kind`: (model, transformers' report).

    The weights must have every parameter and nothing else, of the right shapes and finite, and config.json must be of
    the class's model_type. allow_missing: True, or patterns of names ("classifier.*"), for what may start anew. A new
    head (`model.new_head`) over a body that was saved with another one is allowed, and a warning names it. spare: other
    weights may be there too. A ValueError names the file, and what in it is wrong.
    """
    if options.setdefault("use_safetensors", True) is not True:
        raise ValueError(f"use_safetensors={options['use_safetensors']!r} is not allowed; choose True")
    resized = options.pop("ignore_mismatched_sizes", False) or allow_missing is True
    where = path  # None: of weights in memory, options["state_dict"]
    path = "state_dict" if where is None else where
    if "config" not in options and where is not None:
        check_kind(path, kind.config_class.model_type, options)
    if "subfolder" not in options and any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX)):
        check_size(Path(path), kind, options.get("config"), anew=bool(resized))
    with without_reports(), reading(path):
        model, info = load(where, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    patterns = ["*"] if allow_missing is True else [*(allow_missing or ())]
    missing = [name for name in sorted(info["missing_keys"]) if not any(fnmatch.fnmatch(name, p) for p in patterns)]
    # A body is loaded from the whole model too.
    spare = spare or allow_missing is True or getattr(model, "is_body", model.base_model is model)
    unexpected = [] if spare else sorted(info["unexpected_keys"])
    missing, unexpected = _with_new_head(model, path, missing, unexpected)
    misshapen = [] if resized else sorted(_shapes(x) for x in info["mismatched_keys"])
    for what, names in (("lack", missing), ("have too many:", unexpected), ("have other shapes:", misshapen)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Damaged(
                f"{path} does not fit its config.json: the weights {what} {', '.join(names[:3])}{more} "
                "(from_pretrained(..., allow_missing=True) loads what fits and starts the rest anew)"
            )
    check_finite(model, path)
    return model, info


def _with_new_head(model: Any, path: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """The names still missing and left over, if the head is new and heads of other models are left out."""
    head = [name for name, _ in model.named_parameters() if name.split(".")[0] in getattr(model, "new_head", ())]
    if not head or not {*head} <= {*missing}:  # a part of a head is a broken file
        return missing, unexpected
    others = [name for name in unexpected if name.split(".")[0] in (*HEADS, *getattr(model, "other_heads", ()))]
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
    with reading(path):
        found, _ = PreTrainedConfig.get_config_dict(path, local_files_only=local, **known)
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind != model_type:
        raise OtherKind(f"{path}: config.json has model_type={kind!r}; this class loads {model_type!r}")


def check_size(folder: Path, kind: Any, config: Any, anew: bool) -> None:
    """Raise a ValueError if config.json is invalid, or describes a model much larger than the weights: transformers
    would first allocate all of it. config: instead of config.json; anew: weights may be new."""
    content = read_json(folder / CONFIG) if config is None else config.to_dict()
    shapes = dict(saved_shapes(folder))
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        layers = content.get(name)
        if isinstance(layers, int) and layers > len(shapes) and not anew:
            raise Damaged(f"{folder / CONFIG}: {name}={layers} does not fit {len(shapes)} weights")
    with reading(folder / CONFIG), torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(folder) if config is None else config)
    wanted, there = sum(p.numel() for p in model.parameters()), sum(map(math.prod, shapes.values()))
    if wanted > 2 * there + SPARE_NUMBERS and not anew:
        raise Damaged(f"{folder / CONFIG} asks for {wanted:,} numbers, and the weights beside it are {there:,}")


def saved_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of the weights in a folder; only their headers are read."""
    files = [folder / WEIGHTS]
    if not files[0].is_file() and (folder / INDEX).is_file():
        with reading(folder / INDEX):
            files = [folder / name for name in sorted({*read_json(folder / INDEX)["weight_map"].values()})]
    for file in files:
        with reading(file), safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118  it is no dict
                yield name, content.get_slice(name).get_shape()


def check_finite(model: nn.Module, path: Any) -> None:
    """Raise a ValueError that names a weight which is not finite."""
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or type(weight.data) is not torch.Tensor:
            continue  # elsewhere (offloaded), or not numbers but codes (quantized)
        if not bool(torch.isfinite(weight).all()):
            raise Damaged(f"{path}: the weight {name} is not finite (NaN or infinite)")


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def saved_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder, or of a name on the hub; a ValueError where there is none.

    From a folder with no tokenizer or an incomplete one, transformers would make one without a vocabulary.
    """
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES):
        raise Damaged(f"{folder} has no tokenizer: tokenizer.json is missing")
    with reading(source):
        tokenizer = AutoTokenizer.from_pretrained(source, **only_local(source))
        words = {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}
    if not words:
        raise Damaged(f"{source}: the tokenizer knows no word; save it again beside the model")
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise Damaged(
            f"{folder / 'tokenizer_config.json'}: model_max_length={longest!r} is not allowed; choose a number"
        )
    return tokenizer


MODULE = "femixer_models"
# Of each configuration the Auto classes of transformers and what they find.
CLASSES: dict[str, dict[str, str]] = {
    "fem": {
        "AutoConfig": "FEMConfig",
        "AutoModel": "FEMModel",
        "AutoModelForCausalLM": "FEMForCausalLM",
        "AutoModelForMaskedLM": "FEMForMaskedLM",
        "AutoModelForSequenceClassification": "FEMForSequenceClassification",
        "AutoModelForTokenClassification": "FEMForTokenClassification",
    },
    "fem_vision": {
        "AutoConfig": "FEMVisionConfig",
        "AutoModel": "FEMVisionModel",
        "AutoModelForImageClassification": "FEMForImageClassification",
        "AutoImageProcessor": "FEMImageProcessor",
    },
    "fem-forecaster": {"AutoConfig": "ForecastConfig", "AutoModel": "Forecaster"},
}
SOURCE = '''\
"""By this file transformers finds the classes of this model: from_pretrained(..., trust_remote_code=True).

It needs the package: pip install "femixer[lm]"
"""

from femixer.models import (
{names}
)

__all__ = [
{quoted}
]
'''
CITATION = """@inproceedings{lu2026freeenergymixer,
  title = {Free Energy Mixer},
  author = {Lu, Jiecheng and Yang, Shihao},
  booktitle = {International Conference on Learning Representations},
  year = {2026},
  eprint = {2602.07160},
  archivePrefix = {arXiv}
}"""


@dataclass(frozen=True)
class Card:
    """What only those who trained a model can tell; empty fields are left out of its card."""

    data: str = ""  # what it was trained on
    command: str = ""  # by which command
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name, as measured


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """What config.json says about where classes are found."""
    return {auto: f"{MODULE}.{name}" for auto, name in CLASSES[config.model_type].items()}


def write_module(config: PreTrainedConfig, folder: Path) -> None:
    names = sorted(CLASSES[config.model_type].values())
    imported, quoted = ("\n".join(line.format(name) for name in names) for line in ("    {},", '    "{}",'))
    (folder / f"{MODULE}.py").write_text(SOURCE.format(names=imported, quoted=quoted), encoding="utf-8")


def check_whole(model: Any) -> None:
    """Raise a ValueError if this process has only a part of the model's weights, or has them by other names."""
    # Heads divided by femixer.parallel, or weights sharded by FSDP2, whose modules can be `unshard`ed.
    if any(getattr(module, "is_apart", False) or hasattr(module, "unshard") for module in model.modules()):
        raise ValueError(
            "the weights of this model are divided over processes; gather them in all of these, and save in one: "
            "save_pretrained(folder, state_dict=femixer.parallel.full_state_dict(model))"
        )


@contextmanager
def mapped(config: PreTrainedConfig) -> Iterator[None]:
    """The configuration with the map to our classes, which belongs only in the file, inside this context."""
    held = getattr(config, "auto_map", None)
    if config.model_type in CLASSES:
        config.auto_map = auto_map(config)
    try:
        yield
    finally:
        if held is not None:
            config.auto_map = held
        elif hasattr(config, "auto_map"):
            del config.auto_map


def write_beside(model: Any, save_directory: Any) -> None:
    """The module and the card in the folder to which the model will be saved."""
    folder, config = Path(save_directory), model.config
    if config.model_type not in CLASSES or folder.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_module(config, folder)
    write_card(model, folder, model.card or Card())


def write_card(model: Any, folder: Path, card: Card) -> None:
    """README.md of a model, unless one that we did not write is there."""
    path = folder / "README.md"
    if not path.exists() or is_ours(path):
        path.write_text(signed(card_of(model, card)), encoding="utf-8")


def signed(text: str) -> str:
    """The text with a last line that shows later whether it has been changed."""
    return f"{text}\n<!-- femixer {hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def is_ours(card: Path) -> bool:
    """Whether we wrote it and it is unchanged; what cannot be read as text is not ours."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    body, found, _ = text.rpartition("\n<!-- femixer ")
    return bool(found) and signed(body) == text


def card_of(model: Any, card: Card) -> str:
    """The text of a model card: what the model is, its sizes, and what `card` tells besides."""
    config, kind = model.config, type(model).__name__
    tags = {"FEMForCausalLM": "text-generation", "FEMForImageClassification": "image-classification"}
    tag = "time-series-forecasting" if config.model_type == "fem-forecaster" else tags.get(kind)
    head = ["---", "library_name: transformers", "tags: [free-energy-mixer]"]
    head += [] if tag is None else [f"pipeline_tag: {tag}"]
    rows = [("class", kind), ("parameters", f"{model.num_parameters():,}")]
    for name in (each for each in SHOWN if hasattr(config, each)):
        value = getattr(config, name)
        rows.append((name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    parts = [
        "\n".join([*head, "---"]),
        f"# {kind}",
        "A model with Free Energy Mixer layers ([paper](https://arxiv.org/abs/2602.07160)).",
        "## Sizes\n\n" + _table(("", ""), rows),
    ]
    if card.data:
        parts.append(f"## Data\n\n{' '.join(card.data.split())}")
    if card.metrics:
        parts.append("## Metrics\n\n" + _table(("metric", "value"), [(n, f"{v:.6g}") for n, v in card.metrics.items()]))
    if card.command:
        parts.append("## Command\n\n" + "\n".join(f"    {line}" for line in card.command.splitlines()))
    parts += [f"## Use\n\n{_use(model)}", f"## Citation\n\n```bibtex\n{CITATION}\n```"]
    return "\n\n".join(parts) + "\n"


SHOWN = (
    *("kind", "mixer", "prior", "parts", "start", "readout", "mixer_temperature", "budget", "value_dim", "causal"),
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "image_size", "patch_size", "channels", "lookback", "horizon"),
    *("fem_parts", "fem_rank"),
)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {a} | {b} |" for a, b in [head, ("---", "---"), *rows])


def _use(model: Any) -> str:
    name, kind = type(model).__name__, model.config.model_type
    lines = ["from femixer.surgery import load", "", f"model = load(path)  # {name}"]  # upgraded: of transformers
    if kind in CLASSES:
        auto = {own: auto for auto, own in CLASSES[kind].items()}.get(name, "AutoModel")
        loading = f"model = {auto}.from_pretrained(path, trust_remote_code=True)"
        lines = [f"from transformers import {auto}", "", loading]
    return "\n".join(['Install it with `pip install "femixer[lm]"`.', "", "```python", *lines, "```"])
