"""What stands beside saved weights: a module by which any tool finds our classes, and a model card."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

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
    """What only the one who trained a model can tell; empty fields are left out of its card."""

    data: str = ""  # what it was trained on
    command: str = ""  # by which command
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name, as measured


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """What config.json says about where classes are found."""
    return {auto: f"{MODULE}.{name}" for auto, name in CLASSES[config.model_type].items()}


def write_module(config: PreTrainedConfig, folder: Path) -> None:
    names = sorted(CLASSES[config.model_type].values())
    lines = {
        "names": "\n".join(f"    {name}," for name in names),
        "quoted": "\n".join(f'    "{name}",' for name in names),
    }
    (folder / f"{MODULE}.py").write_text(SOURCE.format(**lines), encoding="utf-8")


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
    """The configuration with the map to our classes, as long as this lasts: it belongs into the file alone."""
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
    """With a last line by which the text is known again, if nobody has changed it."""
    return f"{text}\n<!-- femixer {hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def is_ours(card: Path) -> bool:
    """Whether we wrote it and nobody has changed it since; what cannot be read as text is not ours."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    body, found, _ = text.rpartition("\n<!-- femixer ")
    return bool(found) and signed(body) == text


def card_of(model: Any, card: Card) -> str:
    """The text of a model card: what the model is, its sizes, and what `card` tells besides."""
    config = model.config
    kinds = {
        "fem": "text-generation",
        "fem_vision": "image-classification",
        "fem-forecaster": "time-series-forecasting",
    }
    head = ["---", "library_name: transformers", "tags: [free-energy-mixer]"]
    if type(model).__name__ in ("FEMForCausalLM", "FEMForImageClassification") or config.model_type == "fem-forecaster":
        head.append(f"pipeline_tag: {kinds[config.model_type]}")
    rows = [("class", type(model).__name__), ("parameters", f"{model.num_parameters():,}")]
    rows += [(name.replace("_", " "), _shown(getattr(config, name))) for name in SHOWN if hasattr(config, name)]
    parts = [
        "\n".join([*head, "---"]),
        f"# {type(model).__name__}",
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
    "kind",
    "mixer",
    "prior",
    "parts",
    "start",
    "readout",
    "mixer_temperature",
    "budget",
    "causal",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "image_size",
    "patch_size",
    "channels",
    "lookback",
    "horizon",
    "fem_parts",
    "fem_rank",
)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {a} | {b} |" for a, b in [head, ("---", "---"), *rows])


def _use(model: Any) -> str:
    if model.config.model_type not in CLASSES:  # upgraded: a class of transformers with FEM in it
        name = type(model).__name__
        return (
            'Install it with `pip install "femixer[lm]"`.\n\n```python\nfrom femixer.surgery import load\n\n'
            f"model = load(path)  # {name}\n```"
        )
    found = {name: auto for auto, name in CLASSES[model.config.model_type].items()}
    auto = found.get(type(model).__name__, "AutoModel")
    lines = [
        'Install it with `pip install "femixer[lm]"`.',
        "",
        "```python",
        f"from transformers import {auto}",
        "",
        f"model = {auto}.from_pretrained(path, trust_remote_code=True)",
        "```",
    ]
    return "\n".join(lines)
