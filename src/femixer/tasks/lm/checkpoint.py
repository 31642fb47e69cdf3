"""A language model on the disk with its tokenizer: checking and loading it.

A model folder is what `save_pretrained` of model and tokenizer write: config.json, model.safetensors and the
tokenizer's files. `femixer lm train` keeps one as `model/` in its results folder.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from femixer.optional import require
from femixer.options import check
from femixer.training.results import model_folder

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SPARE_ROWS = 1024
"""Rows of an embedding beyond the vocabulary are padding for speed; more of them mean another tokenizer."""


@dataclass(frozen=True)
class Placement:
    """Where and how precisely the model computes."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps, ...; auto takes a GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is what the checkpoint was saved in."""

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without that device
            raise ValueError(
                f"device={self.device!r} cannot be used here: {str(error).splitlines()[0]}; try cpu"
            ) from None

    def validate(self) -> None:
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        self.torch_device()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    transformers = _transformers()
    if (folder / "preparation.json").is_file():
        raise ValueError(f"checkpoint={str(folder)!r} is a model of pictures; see `femixer vision maps`")
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")):
        raise ValueError(f"checkpoint={str(folder)!r} has no tokenizer: tokenizer_config.json is missing")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load(checkpoint: Path, placement: Placement | None = None) -> tuple[Any, Any]:
    """Model, in evaluation mode, and tokenizer of a checkpoint (a model folder or a results folder)."""
    placement = placement or Placement()
    placement.validate()
    folder = model_folder(checkpoint)
    tokenizer = load_tokenizer(folder)
    model = _load_model(folder, placement)
    _check_vocabulary(folder, tokenizer, model)
    return model.to(placement.torch_device()).eval(), tokenizer


def fingerprint(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files: another model or tokenizer has another one."""
    digest = hashlib.sha256()
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".safetensors", ".json", ".model")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _load_model(folder: Path, placement: Placement) -> Any:
    transformers = _transformers()
    dtype = "auto" if placement.dtype == "auto" else getattr(torch, placement.dtype)
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": dtype}
    # safetensors raises an exception of its own, which is none of ours to import
    broken = require("safetensors", "cli").SafetensorError
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except broken as error:
        raise ValueError(f"checkpoint={str(folder)!r} has weights that cannot be read: {error}") from None
    # transformers fills what is missing with random numbers and goes on
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            names = ", ".join(sorted(map(str, info[kind]))[:3])
            raise ValueError(
                f"checkpoint={str(folder)!r} does not fit its config.json: {len(info[kind])} {kind.replace('_', ' ')} "
                f"in the weights ({names}, ...)"
            )
    return model


def _check_vocabulary(folder: Path, tokenizer: Any, model: Any) -> None:
    rows, words = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if not words <= rows < words + SPARE_ROWS:
        raise ValueError(
            f"checkpoint={str(folder)!r} has a tokenizer of {words} tokens and a model of {rows}: they do not belong "
            f"together"
        )


def _transformers() -> Any:
    """transformers, knowing our models and those that we upgrade."""
    transformers = require("transformers", "lm")
    import femixer.models
    import femixer.surgery  # noqa: F401

    if not sys.stderr.isatty():  # a bar drawn into a file is only noise
        transformers.utils.logging.disable_progress_bar()
    return transformers
