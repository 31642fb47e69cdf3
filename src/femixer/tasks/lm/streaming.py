"""Text that appears while its tokens are generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

UNFINISHED = "\ufffd"
"""What tokenizers decode to where bytes are no character, which may only mean: not yet."""
CHARACTER_TOKENS = 4
"""The most tokens that one character can take: those of its bytes in UTF-8."""
CONTEXT = 8
"""Tokens of the prompt that are decoded along: some tokenizers drop the space before the first word."""


class TextStream:
    """A streamer for `generate`: calls `show` with each piece of new text as soon as it is certain.

    The pieces put together are the decoded text. A character whose bytes are spread over several tokens waits for
    the last of them, and no longer: bytes that cannot become a character are shown as the replacement character.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str], object]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.context: list[int] | None = None  # tokens that are shown already
        self.fresh: list[int] = []  # tokens since the last moment without an unfinished character
        self.shown = 0  # characters of context and fresh together that are shown

    def put(self, tokens: Tensor) -> None:
        """`generate` calls this with the prompt [1, T] first, and with every new token [1] then."""
        ids = tokens.flatten().tolist()
        if self.context is None:
            self._settle(ids[-CONTEXT:])
            return
        self.fresh += ids
        text = self._decode(self.fresh)
        if not text.endswith(UNFINISHED):
            self._show(text, len(text))
            self._settle(self.fresh)
        elif len(self.fresh) >= CHARACTER_TOKENS:
            self._show(text, len(self._decode(self.fresh[: 1 - CHARACTER_TOKENS])))

    def end(self) -> None:
        """Show what is left, also if it is no complete character."""
        text = self._decode(self.fresh)
        self._show(text, len(text))

    def _settle(self, tokens: list[int]) -> None:
        self.context, self.fresh = tokens, []
        self.shown = len(self._decode([]))

    def _show(self, text: str, until: int) -> None:
        if until > self.shown:
            self.show(text[self.shown : until])
            self.shown = until

    def _decode(self, fresh: list[int]) -> str:
        return self.tokenizer.decode([*(self.context or []), *fresh], skip_special_tokens=True)
