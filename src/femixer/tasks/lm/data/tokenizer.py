"""Tokenizers: bytes, any tokenizer of transformers, or a BPE of one's own; text to tokens for the shards; and tokens as
labels that can be read: on one line, white space and control characters visible, bytes as such.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from femixer.optional import require
from femixer.options import check

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name: str | Path = BYTES) -> Any:
    """A transformers tokenizer: `bytes`, a folder that one was saved in, or a name that transformers knows."""
    if name == BYTES:
        return byte_tokenizer()
    require("transformers", "lm")
    from femixer.models.files import is_offline, saved_tokenizer, why_not_found

    looks_like_path = Path(name).is_dir() or str(name).startswith((".", "/", "~"))
    place = Path(name).expanduser() if looks_like_path else name
    if looks_like_path and not Path(place).is_dir():
        raise unknown(name, "there is no such folder")
    try:
        tokenizer = saved_tokenizer(place)
    except (OSError, ValueError) as error:
        missing = not Path(place).is_dir() and is_offline()
        raise unknown(name, why_not_found(name) if missing else str(error)) from error
    start_and_end(tokenizer)
    return tokenizer


def unknown(name: str | Path, why: str) -> ValueError:
    return ValueError(
        f"tokenizer={str(name)!r} is unknown ({why}); choose 'bytes', a folder with a saved tokenizer "
        "(`femixer lm tokenizer` makes one) or the name of a transformers tokenizer"
    )


def start_and_end(tokenizer: Any) -> tuple[int, int]:
    """The tokens that begin and end a document; they are the same one where the tokenizer has only one of the two."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    state = "has neither a bos nor an eos token, so documents cannot be told apart"
    known = start is not None or end is not None
    check(known, "tokenizer", tokenizer.name_or_path, "one that has, or set tokenizer.eos_token", state)
    return (end if start is None else start), (start if end is None else end)


def byte_tokenizer() -> Any:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""
    tokenizers = require("tokenizers", "lm")
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    return byte_level(tokenizers.Tokenizer(model), split_words=False)


def byte_level(tokenizer: Any, split_words: bool) -> Any:
    """A tokenizer over bytes, of which no text is ever unknown, as transformers takes it."""
    tokenizers, transformers = require("tokenizers", "lm"), require("transformers", "lm")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # generate() goes on at the right end
    )


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> Any:
    """A byte-level BPE with `vocab_size` tokens (fewer where the text has not enough to merge)."""
    check(vocab_size >= 257, "vocab_size", vocab_size, "at least 257: every byte and the end of a text")
    tokenizers = require("tokenizers", "lm")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=byte_characters(), show_progress=progress
    )
    tokenizer.train_from_iterator(texts, trainer)
    return byte_level(tokenizer, split_words=True)


def is_bytes(tokenizer: Any) -> bool:
    """Are its tokens exactly the bytes of UTF-8?"""
    return tokenizer.is_fast and identity(tokenizer)["digest"] == identity(byte_tokenizer())["digest"]


def identity(tokenizer: Any) -> dict[str, Any]:
    """What decides the tokens of a text."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules.pop("truncation"), rules.pop("padding")  # state of the last call
        content: Any = rules
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    start, end = start_and_end(tokenizer)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return {"vocabulary": vocabulary_size(tokenizer), "start": start, "end": end, "digest": digest}


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


Encoder = Callable[[Sequence[str]], list[NDArray[Any]]]
"""Texts to tokens. What looks like a special token in a text is read as the characters it is written with."""


def encoder(folder: Path, plain_bytes: bool) -> Encoder:
    """The encoder of the tokenizer that is saved in `folder`. Each worker makes its own, as lightly as it can: without
    importing transformers, unless the tokenizer is written in Python."""
    if plain_bytes:
        return lambda texts: [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
    if (folder / "tokenizer.json").exists():
        fast = require("tokenizers", "lm").Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.encode_special_tokens = True
        fast.no_truncation()
        fast.no_padding()
        encode = functools.partial(fast.encode_batch_fast, add_special_tokens=False)
        return lambda texts: [np.array(one.ids, dtype=np.uint32) for one in encode([*texts])]
    slow = require("transformers", "lm").AutoTokenizer.from_pretrained(folder)
    options = {"add_special_tokens": False, "split_special_tokens": True}
    return lambda texts: [np.array(slow.encode(text, **options), dtype=np.uint32) for text in texts]


VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
EMPTY = "∅"
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
WORD_START = "▁"  # how sentencepiece spells the space before a word, which decoding one token drops


def labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """A readable label per token; bytes that are no character of their own are shown as \\xNN."""
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}

    def label(token: int, spelling: str) -> str:
        text = tokenizer.decode([token])
        if UNREADABLE in text and all(character in bytes_of for character in spelling):
            text = bytes(bytes_of[character] for character in spelling).decode("utf-8", "backslashreplace")
        elif spelling.startswith(WORD_START) and not text.startswith(" "):
            text = f" {text}"
        return readable(text)

    return [label(token, spelling) for token, spelling in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)]


def byte_characters() -> list[str]:
    """The printable character by which a byte-level tokenizer writes each byte: the byte's own where it is visible in
    Latin-1, and the next one from U+0100 on where it is not."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def readable(text: str) -> str:
    """ "a\\n" becomes "a⏎", a zero byte "\\x00", and a sign that turns the direction of writing its code."""
    signs = (VISIBLE.get(one) or (one if one.isprintable() else one.encode("unicode_escape").decode()) for one in text)
    return "".join(signs) or EMPTY
