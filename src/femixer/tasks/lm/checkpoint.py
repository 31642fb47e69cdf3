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

from femixer.damage import read_text, watch_logits
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


def given_text(text: str | None, file: Path | None, name: str, file_name: str, errors: str = "strict") -> str:
    """The text itself, that of a file, or that of standard input (-); name, file_name: of the options."""
    check(text is None or file is None, name, text, f"either --{name} or --{file_name}")
    if text is not None:
        return text
    if file is not None and str(file) != "-":
        return read_text(file) if errors == "strict" else file.read_text(encoding="utf-8", errors=errors)
    if file is None and sys.stdin.isatty():
        raise ValueError(f"{name}=None is not allowed; choose a --{name}, a --{file_name} or text on standard input")
    return sys.stdin.read()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    _transformers()
    from femixer.models.files import saved_tokenizer

    if (folder / "preparation.json").is_file():
        raise ValueError(f"checkpoint={str(folder)!r} is a model of pictures; see `femixer vision maps`")
    return saved_tokenizer(folder)


def load(checkpoint: Path, placement: Placement | None = None, writes: bool = True) -> tuple[Any, Any]:
    """Model, in evaluation mode, and tokenizer of a checkpoint (a model folder or a results folder).

    writes: the model must be one that continues a text. Its logits are checked in every pass: NaN is no answer.
    """
    placement = placement or Placement()
    placement.validate()
    folder = model_folder(checkpoint)
    tokenizer = load_tokenizer(folder)
    dtype = "auto" if placement.dtype == "auto" else getattr(torch, placement.dtype)
    _transformers()
    from femixer import surgery

    model = surgery.load(folder, dtype=dtype)
    if writes:
        _check_writes(folder, model)
        surgery.check_ends(folder, model)
    _check_vocabulary(folder, tokenizer, model)
    watch_logits(model, str(folder))
    return model.to(placement.torch_device()).eval(), tokenizer


def position_limit(model: Any) -> int | None:
    """The most tokens that a model can read, None where it has no embedding per position."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"wpe", "embed_positions", "position_embeddings"}:
        return int(model.config.max_position_embeddings)
    return None


def check_positions(model: Any, tokens: int, name: str, value: Any) -> None:
    """Raise a ValueError that names the option if the model cannot read as many tokens."""
    limit = position_limit(model)
    why = f"fewer: the model has {limit} positions, and this needs {tokens} (prompt and new tokens together)"
    check(limit is None or tokens <= limit, name, value, why)


def fingerprint(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files: another model or tokenizer has another one."""
    digest = hashlib.sha256()
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".safetensors", ".json", ".model")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _check_writes(folder: Path, model: Any) -> None:
    from femixer.surgery.families import ENCODERS, PREFIX

    kind = model.config.model_type.removeprefix(PREFIX)
    if not model.can_generate() or (kind in ENCODERS and not model.config.is_decoder):
        raise ValueError(
            f"checkpoint={str(folder)!r} is a {type(model).__name__}, which does not continue a text; choose a causal "
            "language model"
        )


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
