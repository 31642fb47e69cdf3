"""Options that every benchmark has: where it runs and how often; and those of mixers, their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from femixer.options import check, check_positive, check_threads
from femixer.state import SPARE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class MeasureOptions:
    """Where to run, how often, and where the results go."""

    batch: int = 2
    """Sequences."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format of weights and tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    threads: int | None = None
    """CPU threads (default: torch's choice)."""
    rounds: int = 20
    """Rounds measured; a round is one sample of every contestant."""
    warmup: int = 3
    """Rounds before that, not counted."""
    seed: int = 0
    """Seed of weights and tokens."""
    out: Path = Path("results/bench")
    """Folder for the results."""

    @property
    def tensors(self) -> dict[str, Any]:
        """Device and number format, as the arguments of whatever makes a tensor or a layer."""
        return {"device": self.device, "dtype": DTYPES[self.dtype]}

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "targets")}

    def validate(self) -> None:
        """Raise a ValueError that names the first value that makes no sense; the layers check their own."""
        check_positive(batch=self.batch, rounds=self.rounds)
        check(self.warmup >= 0, "warmup", self.warmup, "a whole number of at least 0")
        check_threads(self.threads)
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        usable = self.device == "cpu" or (self.device == "cuda" and torch.cuda.is_available())
        check(usable, "device", self.device, "cpu, or cuda where torch finds one")
        check(not self.out.exists() or self.out.is_dir(), "out", str(self.out), "a folder")


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """Those of a benchmark that the project has targets for."""

    targets: bool = False
    """Show the project's target beside each ratio that was measured at the size the target is meant for."""


@dataclass(frozen=True)
class MixerOptions(BenchOptions):
    """The options of mixers, with the defaults of the reference setting for softmax."""

    dim: int = 768
    """Width of the tokens."""
    heads: int = 12
    """Heads; divides dim."""
    kv_heads: int | None = None
    """Key/value heads; divides heads (default: as many as heads)."""
    decode_steps: int = 16
    """Tokens decoded per sample, from the same state each time."""

    def validate(self) -> None:
        super().validate()
        check(0 < self.decode_steps <= SPARE, "decode_steps", self.decode_steps, f"a whole number from 1 to {SPARE}")


def check_distinct(name: str, given: Sequence[object]) -> None:
    check(len(set(given)) == len(given) > 0, name, given, "one or more, each once")
