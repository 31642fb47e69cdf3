"""`femixer bench <what> [options]`. A benchmark is a function `main(args)` in a file, and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.options import dispatch

BENCHES = {
    "layer": ("femixer.bench.layer", "FEM layers against one softmax attention layer with as many parameters"),
    "scaling": ("femixer.bench.scaling", "time per token and memory against the length, and decoding far out"),
    "speed": ("femixer.bench.speed", "the paper's two tables of speed, its figures beside ours"),
    "vision": ("femixer.bench.steps:vision", "vision models: the step of training against plain attention"),
    "forecast": ("femixer.bench.steps:forecast", "forecasters: the time of a training step"),
    "gpu": ("femixer.bench.gpu", "layers and models on a GPU, or an estimate of the layers without one"),
    "lm": ("femixer.bench.lm", "language models: training and decoding speed, and the size of the cache"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer bench", BENCHES, args)
