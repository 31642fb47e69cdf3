"""Tokens as labels that can be read: on one line, white space and control characters visible, bytes as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    return "".join(map(_sign, text)) or EMPTY


def _sign(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
