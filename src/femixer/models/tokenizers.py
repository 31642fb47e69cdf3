"""The tokenizer that stands beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from femixer.damage import Damaged, reading
from femixer.models.hub import only_local

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def saved_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder, or of a name on the hub; a ValueError where there is none.

    Of a folder without one, or with half of one, transformers makes a tokenizer that knows no word.
    """
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES):
        raise Damaged(f"{folder} has no tokenizer: tokenizer.json is missing")
    with reading(source):
        tokenizer = AutoTokenizer.from_pretrained(source, **only_local(source))
        words = {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}
    if not words:
        raise Damaged(f"{source}: the tokenizer knows no word; save it again beside the model")
    return tokenizer
