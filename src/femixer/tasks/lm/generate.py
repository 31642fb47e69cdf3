"""`femixer generate`: continue a prompt, shown token by token."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from femixer.optional import require
from femixer.options import check, model_first, parse
from femixer.tasks.lm.checkpoint import Placement, check_positions, load
from femixer.tasks.lm.prompt import LEFT, Prompt, given, read
from femixer.training.results import model_folder

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


tyro = require("tyro", "cli")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_tokens: int = 200
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 takes the most probable token each time; above 0 tokens are drawn, the more freely the higher."""
    top_k: int | None = None
    """Draw from this many most probable tokens only."""
    top_p: float | None = None
    """Draw only from the most probable tokens that have this probability together."""
    beams: int = 1
    """Beams of a beam search. Above 1 the text is shown when it is complete."""
    seed: int = 0
    """Seed of the drawing."""
    ignore_end: bool = False
    """Do not stop at the end of the text, but after max-tokens only."""

    def validate(self) -> None:
        check(self.max_tokens > 0, "max_tokens", self.max_tokens, "a whole number above 0")
        check(0 <= self.temperature < float("inf"), "temperature", self.temperature, "a number of at least 0")
        check(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "a whole number above 0")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and up to 1")
        check(self.beams > 0, "beams", self.beams, "a whole number above 0")
        if self.temperature == 0:
            for name in ("top_k", "top_p"):
                check(getattr(self, name) is None, name, getattr(self, name), "a --temperature above 0 to draw tokens")
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
    stream = TextStream(tokenizer, show)
    config = sampling.config(model, tokenizer)
    _warm_up(model, config)
    torch.manual_seed(sampling.seed)
    pace = Pace(0, time.perf_counter())
    try:
        known = read(model, tokenizer, prompt, sampling.max_tokens, whole=sampling.beams > 1)
        pace.prompt, tokens = known.count, known.tokens
        options: dict[str, Any] = {"generation_config": config, "stopping_criteria": [pace], **known.options()}
        if sampling.beams > 1:
            stream.put(tokens)
            stream.put(model.generate(tokens, **options)[:, tokens.shape[1] :])
            stream.end()
        else:
            model.generate(tokens, streamer=stream, **options)
    except KeyboardInterrupt:
        stream.end()
        raise Stopped(pace) from None
    return pace


def _warm_up(model: Any, config: Any) -> None:
    """One token of prompt and one more: the first pass of a process also loads what it needs, which is no speed."""
    brief = type(config)(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=config.pad_token_id)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.generate(token, generation_config=brief, attention_mask=torch.ones_like(token))


class Stopped(KeyboardInterrupt):
    """Ctrl-C during generation; what there is has been shown."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(str(pace))


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a trained model.

    The new text goes to standard output as it is generated; speed and messages go to standard error.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
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
