"""`femixer bench lm`: FEM language models against the plain transformer and transformers' Llama of the same size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from femixer.bench.calls import Generator, Training
from femixer.bench.contestants import ATTENTION, arguments, caches, check_priors, full_label
from femixer.bench.measure import (
    Benchmark,
    MixerOptions,
    Spread,
    bytes_cell,
    fits,
    paired_ratio,
    ratio_cell,
    timed,
    told,
    unlimited_compilation,
)
from femixer.bench.measure import Report as BenchReport
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.options import Count, Rule, Whole, check, check_different
from femixer.priors import parse_prior
from femixer.reporting import Column, Table

Measure = Literal["training", "decode"]
MEASURES: tuple[Measure, ...] = ("training", "decode")
LLAMA = "llama"
RIVALS = {LLAMA: "Llama of transformers", ATTENTION: "plain transformer"}
Model = LlamaForCausalLM | FEMForCausalLM
Length = Annotated[int, Rule("a whole number above 1: a token and one to predict", lambda x: x > 1)]


@dataclass(frozen=True)
class Options(MixerOptions):
    """Language models: speed of training and of greedy decoding, and the size of the cache, as ratios.

    FEM is compared with the plain transformer (the same model with attention) and with transformers' Llama, both of the
    same size. Every ratio compares two samples of the same round, and the table gives the median over the rounds with
    the quartiles. The results are lm.json and lm.md.
    """

    dim: Count = 512
    heads: Count = 8
    layers: Count = 8
    """Layers."""
    vocabulary: Count = 8192
    """Tokens of the vocabulary."""
    batch: Count = 2
    """Sequences of a training step."""
    length: Length = 1024
    """Tokens of a training sequence."""
    rounds: Count = 10
    warmup: Whole = 2
    priors: tuple[str, ...] = ("softmax", "gla", "aft", "mamba")
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    measure: tuple[Measure, ...] = MEASURES
    """What to measure: training steps, decoding, or both."""
    compile: bool = False
    """Train with torch.compile, whose own time is not counted. Decoding is always eager."""
    contexts: tuple[Length, ...] = (128, 1024, 4096)
    """Tokens seen when decoding goes on; a table for each."""
    decode_batch: Count = 1
    """Sequences decoded side by side."""
    decode_steps: int = 32
    """Tokens decoded per sample, from the same cache each time; their median is the sample."""

    def validate(self) -> None:
        super().validate()
        even = 2 * self.heads  # the rivals rotate pairs of channels
        allowed = f"a multiple of {even}: an even number for each of {self.heads} heads"
        check(self.dim % even == 0, "dim", self.dim, allowed)
        divides = self.kv_heads is None or (self.kv_heads > 0 and self.heads % self.kv_heads == 0)
        check(divides, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        check_different(self, "measure")
        check_different(self, "contexts")
        check_priors(self)
        with torch.device("meta"):
            for contestant in decoding(self):
                contestant.model(self)  # an option that does not fit shows now, not after the models before it

    @property
    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__}


# The contestants: Llama of transformers, the plain transformer and FEM, of one size


@dataclass(frozen=True)
class Contestant:
    """prior: of FEM as on the command line, or "attention" or "llama". cache: which of the softmax prior's two, None
    for the one in its name or its default."""

    prior: str
    cache: str | None = None

    def name(self, parts: str) -> str:
        return RIVALS.get(self.prior) or full_label(self.prior, parts)

    def model(self, options: Options) -> Model:
        """In float32, on the device that is torch's default."""
        size: dict[str, Any] = {
            "vocab_size": options.vocabulary,
            "hidden_size": options.dim,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads or options.heads,
            "max_position_embeddings": max(options.length, max(options.contexts) + 2 + options.decode_steps),
        }
        if self.prior == LLAMA:
            size["intermediate_size"] = FEMConfig(**size).intermediate_size
            # No token ends a text, so that all models decode as many; sdpa is the fastest attention it has everywhere.
            how: Any = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
            return LlamaForCausalLM(LlamaConfig(**size, **how))
        if self.prior == ATTENTION:
            return FEMForCausalLM(FEMConfig(**size, mixer="attention"))
        given = arguments(self.prior, self.cache)
        of_the_prior = {given["prior"]: given.pop("prior_options")}
        return FEMForCausalLM(FEMConfig(**size, **given, parts=options.parts, prior_options=of_the_prior))

    def build(self, options: Options) -> Model:
        model = self.model(options)
        model.to(**options.tensors)
        return model


def decoding(options: Options) -> list[Contestant]:
    """The rivals first; FEM once for each cache that the softmax prior has."""
    own = [Contestant(prior, cache) for prior in options.priors for cache in caches(prior, options.parts)]
    return [*map(Contestant, RIVALS), *own]


# The results


@dataclass(frozen=True)
class Speed:
    """Tokens per second, and their ratio to the rival's of the same round: above 1 is faster than the rival.

    samples: seconds, one per round.
    """

    tokens_per_second: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float], rival: Sequence[float]) -> Speed:
        """Of samples that take so many seconds for so many tokens, as the rival's do."""
        return cls(Spread.of([tokens / s for s in seconds]), paired_ratio(rival, seconds), seconds)


@dataclass(frozen=True)
class TrainingCost:
    """Forward, backward and a step of AdamW; the rival is the plain transformer."""

    name: str
    prior: str
    parameters: int
    speed: Speed


@dataclass(frozen=True)
class DecodeCost:
    """One more token after a context; the rival is Llama, also for cache_bytes, which are of one sequence.

    bytes_per_token: of the context, None where the cache does not grow.
    """

    name: str
    prior: str
    cache: str | None
    context: int
    speed: Speed
    cache_bytes: float
    cache_ratio: float
    bytes_per_token: float | None


@dataclass(frozen=True)
class Report(BenchReport):
    training: list[TrainingCost]
    decode: list[DecodeCost]


# The measurement


def training_of(contestant: Contestant, tokens: Tensor, options: Options) -> Training:
    """A language model that learns tokens [B, T]."""
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return Training.start(contestant.build(options), batch, options.compile)


def measure_training(options: Options) -> list[TrainingCost]:
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    with unlimited_compilation(options.compile):
        contestants = map(Contestant, (*RIVALS, *options.priors))
        field = {contestant: training_of(contestant, tokens, options) for contestant in contestants}
        seconds = timed("training", {contestant: training.time for contestant, training in field.items()}, options)
    rival = seconds[Contestant(ATTENTION)]
    return [
        TrainingCost(c.name(options.parts), c.prior, training.parameters, Speed.of(tokens.numel(), seconds[c], rival))
        for c, training in field.items()
    ]


def generator_of(model: Model, context: int, options: Options) -> Generator:
    tokens = torch.randint(options.vocabulary, (options.decode_batch, context + 1), device=options.device)
    return Generator.after(model, tokens, options.decode_steps)


def measure_decode(options: Options) -> list[DecodeCost]:
    field = {}
    for contestant in told(decoding(options), f"models that read {len(options.contexts)} contexts"):
        model = contestant.build(options).eval()
        for context in options.contexts:
            field[contestant, context] = generator_of(model, context, options)
    seconds = timed("decode", {entry: generator.time for entry, generator in field.items()}, options)
    return [
        DecodeCost(
            contestant.name(options.parts),
            contestant.prior,
            contestant.cache,
            context,
            Speed.of(options.decode_batch, seconds[contestant, context], seconds[rival]),
            generator.cache_bytes,
            generator.cache_bytes / field[rival].cache_bytes,
            generator.cache_bytes / context if generator.grows else None,
        )
        for (contestant, context), generator in field.items()
        for rival in [(Contestant(LLAMA), context)]
    ]


# What the project is content with, and the sizes that is meant for

# The least speed of FEM with the softmax prior: of the plain transformer's in training, of Llama's in decoding.
TRAINING, DECODE = 0.85, 0.90
# The largest cache of FEM with the softmax prior, where it keeps the values once.
CACHE = 0.78
# A time per token counts as flat in the context where it grows by no more than this.
FLAT = 1.10

SIZE = {"dim": 512, "heads": 8, "kv_heads": None, "layers": 8, "parts": "CLTG", "dtype": "float32", "device": "cpu"}
TRAINING_SIZE = {**SIZE, "batch": 2, "length": 1024, "vocabulary": 8192}
DECODE_SIZE = {**SIZE, "decode_batch": 1}
DECODE_CONTEXT = 1024


class DecodeTarget(NamedTuple):
    """At least this speed, at most this cache; None where there is none."""

    speed: float | None = None
    cache: float | None = None


def decode_target(cost: DecodeCost, settings: Mapping[str, Any]) -> DecodeTarget:
    if not (_is_softmax(cost) and cost.context == DECODE_CONTEXT and fits(settings, DECODE_SIZE)):
        return DecodeTarget()
    return DecodeTarget(DECODE, CACHE if cost.cache == "value" else None)


def _is_softmax(cost: TrainingCost | DecodeCost) -> bool:
    if cost.prior in RIVALS:
        return False
    name, given = parse_prior(cost.prior)
    return name == "softmax" and set(given) <= {"cache"}


# The tables: training, decoding at each context, and growth with the context


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    setting = (
        f"{s['layers']} layers, dim {s['dim']}, {report.heads}, vocabulary {s['vocabulary']}, {report.place()}, "
        f"transformers {report.environment['transformers']}"
    )
    if report.training:
        rows = []
        for cost in report.training:
            target = TRAINING if targets and _is_softmax(cost) and fits(s, TRAINING_SIZE) else None
            ratio = "1" if cost.prior == ATTENTION else ratio_cell(cost.speed.ratio, target, at_least=True)
            rows.append([cost.name, f"{cost.parameters:,}", f"{cost.speed.tokens_per_second.median:.0f}", ratio])
        mode = "compiled" if s["compile"] else "eager"
        title = f"Training, {mode}: {s['length']} tokens, batch {s['batch']}, {setting}"
        header = ["model", "parameters", "tokens per second", "ratio to the plain transformer (larger is better)"]
        yield Table.of(header, rows, title)
    contexts = [*dict.fromkeys(cost.context for cost in report.decode)]
    for context in contexts:
        costs = [cost for cost in report.decode if cost.context == context]
        rows = [_decode_row(each, decode_target(each, s) if targets else DecodeTarget()) for each in costs]
        title = f"Greedy decoding with cache: context {context}, batch {s['decode_batch']}, {setting}"
        columns: list[Column | str] = ["model", "cache", "ms per token", "tokens per second"]
        columns += ["ratio to Llama (larger is better)", "cache bytes"]
        columns += [Column("ratio to Llama", "cache_ratio", "right"), "bytes per token of context"]
        yield Table.of(columns, rows, title)
    if len(contexts) > 1:
        rows = []
        for name, cache in dict.fromkeys((cost.name, cost.cache) for cost in report.decode):
            # Time per token at the longest context relative to the shortest, round by round.
            costs = [cost for cost in report.decode if (cost.name, cost.cache) == (name, cache)]
            first, last = (choose(costs, key=lambda cost: cost.context) for choose in (min, max))
            growth = paired_ratio(last.speed.samples, first.speed.samples)
            # For caches of constant size, that is, for the priors in linear time.
            target = FLAT if targets and last.bytes_per_token is None and fits(s, DECODE_SIZE) else None
            rows.append([name, cache or "", f"{first.context} to {last.context}", ratio_cell(growth, target)])
        title = "Growth of the time per token with the context (1: flat)"
        yield Table.of(["model", "cache", "context", "growth"], rows, title)


def _decode_row(cost: DecodeCost, target: DecodeTarget) -> list[str]:
    rival = cost.prior == LLAMA
    return [
        cost.name,
        cost.cache or "",
        f"{Spread.of(cost.speed.samples).median * 1e3:.2f}",
        f"{cost.speed.tokens_per_second.median:.1f}",
        "1" if rival else ratio_cell(cost.speed.ratio, target.speed, at_least=True),
        bytes_cell(cost.cache_bytes),
        "1" if rival else ratio_cell(cost.cache_ratio, target.cache),
        bytes_cell(cost.bytes_per_token),
    ]


def measure(options: Options) -> dict[str, Sequence[Any]]:
    training = measure_training(options) if "training" in options.measure else []
    return {"training": training, "decode": measure_decode(options) if "decode" in options.measure else []}


BENCHMARK = Benchmark("lm", Options, measure, Report, tables)
run, main = BENCHMARK.run, BENCHMARK.main
