"""`femixer generate`: continue a prompt of any length, shown token by token.

Neither the text of the prompt nor its tokens are ever there as a whole. A long text is cut after line ends, as training
data are, and its tokens go through the model a piece at a time, with progress; what is left is the model's state and
the last tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any

import torch
from torch import Tensor

from femixer.damage import Damaged, reading
from femixer.optional import require
from femixer.options import Count, NotNegative, Rule, check, check_all, check_options, model_first, parse, positional
from femixer.tasks.lm.data.sources import pieces
from femixer.tasks.lm.model import Placement, check_positions, load
from femixer.training.engine import free_bytes, gigabytes
from femixer.training.journal import counting
from femixer.training.results import model_folder

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

        def echoed(text: str) -> str:
            show(text)
            return text

        return replace(self, texts=map(echoed, self.texts))


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
    typed = file is None and sys.stdin.isatty()
    check(not typed, "prompt", None, "a --prompt, a --prompt-file or text on standard input")
    return Prompt(stretches(sys.stdin.buffer, "standard input"), "prompt_file", "-")


def of_file(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        yield from stretches(file, str(path))


def stretches(file: IO[bytes], name: str) -> Iterator[str]:
    """The text of a file, without the line end that a file or `echo` puts last."""
    last, at, raws = "", 0, pieces(file, None)
    while True:
        with reading(name):  # not around the yield, which would take over the errors of who reads
            raw = next(raws, None)
        if raw is None:
            break
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


@torch.no_grad()
def read(model: Any, tokenizer: Any, prompt: Prompt, new: int, whole: bool = False) -> Reader:
    """Read a prompt after which there will be `new` tokens; whole: nothing of it, for those who read all at once."""
    reader = Reader(model, prompt, new)
    with counting(prompt.size, "bytes of the prompt") as told:
        for number, (ids, size) in enumerate(tokens(tokenizer, prompt)):
            if whole and number:
                check(False, prompt.option, prompt.value, "a shorter prompt: a beam search reads it all at once")
            reader.add(ids, size, told, all_later=whole)
    return reader


class Reader:
    """Puts tokens through a model, and looks at how much it remembers."""

    def __init__(self, model: Any, prompt: Prompt, new: int) -> None:
        self.model, self.prompt, self.new = model, prompt, new
        self.waiting = torch.zeros(1, 0, dtype=torch.long)
        """[1, T]: what is left to read; of a short prompt all of it."""
        self.cache: Any = None
        """What the model remembers of the rest, if there is any."""
        self.count = self.read = self.bytes = 0
        """Tokens so far, those of them that the model has read, and the bytes of all."""
        self.first: tuple[int, int] | None = None
        """Tokens and size of the cache after the first piece."""

    def options(self) -> dict[str, Any]:
        """For generate(). Its tokens continue a cache if the attention mask is longer than they are."""
        inputs = self.waiting.to(self.model.device)
        if self.cache is None:
            return {"inputs": inputs, "attention_mask": torch.ones_like(inputs)}
        return {"inputs": inputs, "attention_mask": inputs.new_ones(1, self.count), "past_key_values": self.cache}

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
            before, done = done, done + piece.shape[1]
            told(size * done // ready.shape[1] - size * before // ready.shape[1])

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
        free = free_bytes(self.model.device)
        tokens = self.read + rest
        allowed = (
            f"a shorter one, or a model whose memory does not grow: this one keeps {each:,.0f} bytes of each token, "
            f"{gigabytes(each * tokens)} of about {tokens:,}, and {gigabytes(free)} are free"
        )
        check(each * rest <= free, self.prompt.option, self.prompt.value, allowed)


def size_of(cache: Any) -> int:
    """Bytes of a cache: of ours, or of transformers' with keys and values."""
    states = [state for state in getattr(cache, "states", []) if state is not None]
    tensors = [getattr(layer, name, None) for layer in getattr(cache, "layers", []) for name in ("keys", "values")]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return held + sum(state.nbytes for state in states)


UNFINISHED = "\ufffd"
"""What tokenizers decode to where bytes are no character, which may only mean: not yet."""
CHARACTER_TOKENS = 4
"""The most tokens that one character can take: those of its bytes in UTF-8."""
CONTEXT = LEFT
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


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_tokens: Count = 200
    """Most tokens to generate."""
    temperature: NotNegative = 0.0
    """0 takes the most probable token each time; above 0 tokens are sampled at this temperature."""
    top_k: Count | None = None
    """Draw from this many most probable tokens only."""
    top_p: float | None = None
    """Draw only from the most probable tokens that have this probability together."""
    beams: Count = 1
    """Beams of a beam search. Above 1 the text is shown when it is complete."""
    seed: int = 0
    """Seed of the drawing."""
    ignore_end: bool = False
    """Do not stop at the end of the text, but after max-tokens only."""

    def validate(self) -> None:
        check_options(self)
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and up to 1")
        if self.temperature == 0:
            check_all(self, Rule("a --temperature above 0 to draw tokens", lambda given: False), "top_k", "top_p")
        else:
            check(self.beams == 1, "beams", self.beams, "either --beams or a --temperature above 0")

    def config(self, model: Any, tokenizer: Any) -> Any:
        """As transformers wants it; defaults that a checkpoint brings along (some sample) do not apply."""
        end = model.generation_config.eos_token_id
        end = tokenizer.eos_token_id if end is None else end
        pad = tokenizer.pad_token_id
        drawing = {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        return require("transformers", "lm").GenerationConfig(
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.max_tokens if self.ignore_end else None,
            num_beams=self.beams,
            do_sample=self.temperature > 0,
            eos_token_id=end,
            pad_token_id=pad if pad is not None else end[0] if isinstance(end, list) else end,
            **(drawing if self.temperature > 0 else {}),
        )


@dataclass
class Pace:
    """When the tokens came. `generate` calls this after each of them."""

    prompt: int
    began: float
    steps: int = 0
    first: float = 0.0
    last: float = 0.0

    def __call__(self, ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.steps += 1
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)  # nobody is to stop here

    def __str__(self) -> str:
        """The first new token comes with the prompt, so decoding is the others and the time between them."""
        if not self.steps:
            return f"prompt: {self.prompt} tokens; nothing was generated"
        prefill = self.first - self.began
        text = f"prompt: {self.prompt} tokens in {prefill:.2f} s, {self.prompt / prefill:.1f} tokens/s"
        text += f"; new: {self.steps} token{'s' if self.steps > 1 else ''}"
        if self.steps > 1:
            decode = self.last - self.first
            text += f" in {decode:.2f} s, {(self.steps - 1) / decode:.1f} tokens/s"
        return text


def generate(
    model: Any, tokenizer: Any, prompt: Prompt | str, sampling: Sampling, show: Callable[[str], object]
) -> Pace:
    """Call `show` with the continuation of `prompt`, piece by piece; Ctrl-C ends it early."""
    sampling.validate()
    prompt = Prompt.of(prompt) if isinstance(prompt, str) else prompt
    check_positions(model, sampling.max_tokens, "max_tokens", sampling.max_tokens)
    most = model.config.vocab_size  # the first new token has no more candidates
    check(sampling.beams <= most, "beams", sampling.beams, f"at most {most}, the model's vocabulary")
    stream = TextStream(tokenizer, show)
    config = sampling.config(model, tokenizer)
    _warm_up(model, config)
    torch.manual_seed(sampling.seed)
    pace = Pace(0, time.perf_counter())
    try:
        known = read(model, tokenizer, prompt, sampling.max_tokens, whole=sampling.beams > 1)
        pace.prompt = known.count
        options: dict[str, Any] = {"generation_config": config, "stopping_criteria": [pace], **known.options()}
        if sampling.beams > 1:
            stream.put(known.waiting)
            stream.put(model.generate(**options)[:, known.waiting.shape[1] :])
            stream.end()
        else:
            model.generate(streamer=stream, **options)
    except KeyboardInterrupt:
        stream.end()
        raise Stopped(str(pace)) from None
    return pace


def _warm_up(model: Any, config: Any) -> None:
    """One token of prompt and one more: the first pass of a process also loads what it needs, which is no speed."""
    brief = type(config)(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=config.pad_token_id)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.generate(token, generation_config=brief, attention_mask=torch.ones_like(token))


class Stopped(KeyboardInterrupt):
    """Ctrl-C during generation; what there is has been shown, and the message is its pace."""


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a trained model.

    The new text goes to standard output as it is generated; speed and messages go to standard error.
    """

    checkpoint: Annotated[Path, positional()]
    """Model folder, or results folder of `femixer lm train`."""
    sampling: Sampling
    placement: Placement
    prompt: str | None = None
    """Text to continue; without it --prompt-file or standard input is read."""
    prompt_file: Path | None = None
    """File with the text to continue; - is standard input."""
    echo: bool = False
    """Print the prompt too, before its continuation."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, model_first(args), "generate")
    command.sampling.validate()
    model_folder(command.checkpoint)  # says what is wrong before anything slow
    prompt = given(command.prompt, command.prompt_file)
    model, tokenizer = load(command.checkpoint, command.placement)
    try:
        shown = prompt.shown(write) if command.echo else prompt
        pace = generate(model, tokenizer, shown, command.sampling, write)
        write("\n")
    except Stopped as stop:
        write("\n")
        print(f"stopped; {stop}", file=sys.stderr)
        return 130
    print(pace, file=sys.stderr)
    return 0


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
