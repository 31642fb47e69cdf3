"""A prompt of any length: its text in stretches, and what a model remembers of it.

Neither the text nor its tokens are ever there as a whole. A long text is cut after line ends, as training data are, and
its tokens go through the model a piece at a time, with progress; what is left is the model's state and the last tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from femixer import memory
from femixer.damage import Damaged, reading
from femixer.options import check
from femixer.tasks.lm.checkpoint import check_positions
from femixer.tasks.lm.data.sources import pieces
from femixer.training.journal import counting

PIECE = 8192
"""Tokens that are read at once."""
LINE = 1 << 16
"""Bytes of a stretch that is worth its own."""
LEFT = 8
"""Tokens of a long prompt that are not read here but left to `generate`, whose streamer shows new text after them."""


@dataclass(frozen=True)
class Prompt:
    """Text to continue."""

    texts: Iterable[str]
    """Its stretches, one after another."""
    option: str
    """Which gave it, and its value, for messages."""
    value: str
    size: int | None = None
    """Bytes, where they are known beforehand."""

    @classmethod
    def of(cls, text: str) -> Prompt:
        value = text if len(text) <= 40 else text[:39] + "…"
        size = len(text.encode(errors="replace"))
        check(text == text.encode(errors="replace").decode(), "prompt", value, "text that can be written in UTF-8")
        return cls([text], "prompt", value, size)

    def shown(self, show: Callable[[str], object]) -> Prompt:
        """The same, shown as it is read."""

        def texts() -> Iterator[str]:
            for text in self.texts:
                show(text)
                yield text

        return Prompt(texts(), self.option, self.value, self.size)


def given(text: str | None, file: Path | None) -> Prompt:
    """The prompt of --prompt, of --prompt-file or of standard input (-)."""
    check(text is None or file is None, "prompt", text, "either --prompt or --prompt-file")
    if text is not None:
        return Prompt.of(text)
    if file is not None and str(file) != "-":
        check(not file.is_dir(), "prompt_file", str(file), "a file with text, not a folder")
        with file.open("rb"):  # what is wrong with it shows before anything slow
            size = file.stat().st_size
        return Prompt(of_file(file), "prompt_file", str(file), size)
    if file is None and sys.stdin.isatty():
        raise ValueError("prompt=None is not allowed; choose a --prompt, a --prompt-file or text on standard input")
    return Prompt(stretches(sys.stdin.buffer, "standard input"), "prompt_file", "-")


def of_file(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        texts = stretches(file, str(path))
        while True:
            with reading(path):  # not around the yield, which would take over the errors of who reads
                text = next(texts, None)
            if text is None:
                return
            yield text


def stretches(file: IO[bytes], name: str) -> Iterator[str]:
    """The text of a file, without the line end that a file or `echo` puts last."""
    last, at = "", 0
    for raw in pieces(file, None):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"{name}: not text in UTF-8 ({error.reason} at byte {at + error.start})") from None
        at += len(raw)
        if last and len(raw) > LINE:  # and not only the rest of a last line
            yield last
            last = ""
        last += text.replace("\r\n", "\n")
    yield last.removesuffix("\n")


def tokens(tokenizer: Any, prompt: Prompt) -> Iterator[tuple[list[int], int]]:
    """The tokens of each stretch, and of how many bytes; of an empty prompt the token that a text begins with."""
    texts = iter(prompt.texts)
    first, second = next(texts, ""), next(texts, None)
    if second is None:
        yield whole_tokens(tokenizer, first), len(first.encode())
        return
    begin, end = special_tokens(tokenizer)
    yield begin, 0
    for text in chain((first, second), texts):
        yield plain_tokens(tokenizer, text), len(text.encode())
    yield end, 0


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Without those that begin and end a text."""
    if not tokenizer.is_fast:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    # What transformers makes around it is in reference cycles: 50 MB of each stretch would wait for the collector.
    rules = tokenizer.backend_tokenizer
    rules.no_truncation()
    rules.no_padding()
    return rules.encode_batch_fast([text], add_special_tokens=False)[0].ids


def whole_tokens(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text)["input_ids"] if text else []
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        check(start is not None, "prompt", text, "some text: this tokenizer has no token to begin with")
        ids = [start]
    return ids


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    text, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    at = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    return whole[:at], whole[at + len(text) :]


@dataclass(frozen=True)
class Read:
    """A prompt that a model has read, up to its last tokens."""

    tokens: Tensor
    """[1, T]: what is left to read; of a short prompt all of it."""
    count: int
    """Tokens of the whole prompt."""
    cache: Any = None
    """What the model remembers of the rest, if there is any."""

    def options(self) -> dict[str, Any]:
        """For generate(). Its tokens continue a cache if the attention mask is longer than they are."""
        from femixer.models.cache import FEMCache

        if self.cache is None:
            return {"attention_mask": torch.ones_like(self.tokens)}
        # States of our mixers know which tokens they have seen; others want a mask of all keys.
        length = self.tokens.shape[1] + 1 if isinstance(self.cache, FEMCache) else self.count
        mask = torch.ones(1, length, dtype=torch.long, device=self.tokens.device)
        return {"attention_mask": mask, "past_key_values": self.cache}


@torch.no_grad()
def read(model: Any, tokenizer: Any, prompt: Prompt, new: int, whole: bool = False) -> Read:
    """Read a prompt after which there will be `new` tokens; whole: nothing of it, for those who read all at once."""
    reader = Reader(model, prompt, new)
    with counting(prompt.size, "bytes of the prompt") as told:
        for number, (ids, size) in enumerate(tokens(tokenizer, prompt)):
            if whole and number:
                check(False, prompt.option, prompt.value, "a shorter prompt: a beam search reads it all at once")
            reader.add(ids, size, told, all_later=whole)
    return Read(reader.waiting.to(model.device), reader.count, reader.cache)


class Reader:
    """Puts tokens through a model, and looks at how much it remembers."""

    def __init__(self, model: Any, prompt: Prompt, new: int) -> None:
        self.model, self.prompt, self.new = model, prompt, new
        self.waiting = torch.zeros(1, 0, dtype=torch.long)
        self.cache: Any = None
        self.count = self.read = self.bytes = 0
        self.first: tuple[int, int] | None = None
        """Tokens and size of the cache after the first piece."""

    def add(self, ids: list[int], size: int, told: Callable[[int], None], all_later: bool) -> None:
        """ids: the tokens of so many bytes."""
        self.count += len(ids)
        self.bytes += size
        check_positions(self.model, self.count + 1, self.prompt.option, self.prompt.value)
        check_positions(self.model, self.count + self.new, "max_tokens", self.new)
        self.waiting = torch.cat([self.waiting, torch.tensor([ids], dtype=torch.long)], 1)
        if all_later or self.waiting.shape[1] <= PIECE + LEFT:
            told(size)
            return
        ready, self.waiting = self.waiting[:, :-LEFT], self.waiting[:, -LEFT:]
        done = 0
        for piece in ready.split(PIECE, 1):
            known = self.model.base_model(piece.to(self.model.device), past_key_values=self.cache, use_cache=True)
            self.cache = known.past_key_values
            self.read += piece.shape[1]
            self.check_memory()
            share = size * piece.shape[1] // ready.shape[1]
            told(share)
            done += share
        told(size - done)

    def check_memory(self) -> None:
        """Raise a ValueError if what the model remembers will have outgrown what is free when the prompt ends."""
        now = self.read, size_of(self.cache)
        if self.first is None:
            self.first = now
            return
        windows = [module.window for module in self.model.modules() if hasattr(module, "window")]
        if now[1] <= self.first[1] or (windows and None not in windows):  # windows are full some time later
            return
        each = (now[1] - self.first[1]) / (now[0] - self.first[0])
        rest = self.count - self.read
        if self.prompt.size is not None:
            rest += (self.prompt.size - self.bytes) * self.count // max(self.bytes, 1)
        free = memory.free(self.model.device)
        tokens = self.read + rest
        allowed = (
            f"a shorter one, or a model whose memory does not grow: this one keeps {each:,.0f} bytes of each token, "
            f"{memory.gigabytes(each * tokens)} of about {tokens:,}, and {memory.gigabytes(free or 0)} are free"
        )
        check(free is None or each * rest <= free, self.prompt.option, self.prompt.value, allowed)


def size_of(cache: Any) -> int:
    """Bytes of a cache: of ours, or of transformers' with keys and values."""
    states = [state for state in getattr(cache, "states", []) if state is not None]
    tensors = [getattr(layer, name, None) for layer in getattr(cache, "layers", []) for name in ("keys", "values")]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return held + sum(state.nbytes for state in states)
