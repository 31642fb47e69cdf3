"""Measuring the points: a mixer on sequences of several lengths, and decoding at several positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from femixer.bench.call import Call
from femixer.bench.decoder import Decoder
from femixer.bench.measure import peak_memory, race
from femixer.bench.mixers import Mixer
from femixer.bench.progress import progress
from femixer.bench.scaling.options import Options
from femixer.bench.scaling.report import DecodePoint, SequencePoint

# Short sequences are called several times per sample, so that a sample has at least this many tokens.
TOKENS_PER_SAMPLE = 4096
# Tokens read to see whether a state grows, and to have one to go on from where it does not.
PREFILL = 16


def state_grows(mixer: Mixer, options: Options) -> bool:
    """Whether the mixer keeps every token, so that its time is quadratic in the length."""
    return Decoder.after(mixer.build(options), PREFILL, options.batch, options).grows


def measure_sequences(
    mixer: Mixer, step: str, lengths: Sequence[int], grows: bool, options: Options
) -> list[SequencePoint]:
    torch.manual_seed(options.seed)
    layer = mixer.build(options)
    memory = torch.randn(2, options.batch * max(lengths) * options.dim, **options.tensors)

    def call(length: int) -> Call:
        shape = options.batch, length, options.dim
        x, gradient = (part[: math.prod(shape)].view(shape).detach() for part in memory)
        return Call(layer, layer, x.requires_grad_(), gradient)

    calls = {length: call(length) for length in lengths}
    samples = {length: _sampler(c, step, length, options.batch) for length, c in calls.items()}
    with progress(f"{mixer.prior} {step}", options.warmup + options.rounds) as advance:
        seconds = race(samples, options.rounds, options.warmup, advance)
    points = []
    with progress(f"{mixer.prior} memory", len(lengths)) as advance:
        for length, c in calls.items():
            peak = peak_memory(c.forward if step == "forward" else c.train_and_clear, c.x.device)
            points.append(SequencePoint(mixer.prior, step, length, grows, peak, seconds[length]))
            advance()
    return points


def _sampler(call: Call, step: str, length: int, batch: int) -> Callable[[], float]:
    """A function that gives the seconds per token of a sample."""
    time = call.time_forward if step == "forward" else call.time_training
    repeats = max(1, TOKENS_PER_SAMPLE // length)
    return lambda: sum(time() for _ in range(repeats)) / (repeats * length * batch)


def measure_decode(mixer: Mixer, positions: Sequence[int], grows: bool, options: Options) -> list[DecodePoint]:
    torch.manual_seed(options.seed)
    layer = mixer.build(options)
    if grows:
        decoders = {n: Decoder.after(layer, n, options.batch, options) for n in positions}
    else:
        # A state of constant size costs the same however many tokens led to it: only the position differs.
        decoder = Decoder.after(layer, PREFILL, options.batch, options)
        decoders = {n: decoder.at(n) for n in positions}
    with progress(f"{mixer.prior} decode", options.warmup + options.rounds) as advance:
        times = race({n: d.time for n, d in decoders.items()}, options.rounds, options.warmup, advance)
    return [DecodePoint(mixer.prior, n, grows, times[n]) for n in positions]
