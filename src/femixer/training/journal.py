"""What a run tells of itself, told everywhere at once: to the results folder, to TensorBoard and to whoever watches."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from femixer.optional import require
from femixer.training import distributed
from femixer.training.progress import Display, display
from femixer.training.results import SAMPLES, TENSORBOARD, Record, Results


class Journal:
    """Records and samples of a run, from the main process."""

    def __init__(self, results: Results, shown: Display, board: Any, before: float, tokens: int | None) -> None:
        """before: seconds trained before the run was resumed; tokens: of one global batch."""
        self.results, self.shown, self.board, self.tokens = results, shown, board, tokens
        self.origin = time.monotonic() - before
        self.speed, self.lap = Speed(), Speed()

    def seconds(self) -> float:
        """Seconds of training, counted on from those before the run was resumed."""
        return time.monotonic() - self.origin

    @contextmanager
    def step(self, step: int, losses: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Time one step, and show it; the losses are asked for only if they are."""
        began = time.monotonic()
        yield
        for speed in (self.speed, self.lap):
            speed.add(time.monotonic() - began)
        self.shown.stepped(step, losses, self.rate(self.speed))

    def rate(self, speed: "Speed") -> str:
        unit = self.tokens or 1
        return f"{speed.per_second() * unit:,.{0 if self.tokens else 1}f} {'tokens' if self.tokens else 'steps'}/s"

    def trained(self, step: int, losses: Mapping[str, float], rate: float, norm: float) -> None:
        """A training record: the losses of the global batch of this step, and how fast it went since the last."""
        record: Record = {"split": "train", **losses, "lr": rate, "grad_norm": norm}
        if self.tokens is not None:
            record |= {"tokens": step * self.tokens, "tokens_per_second": round(self.lap.per_second() * self.tokens, 1)}
        self.lap = Speed()
        self._tell(step, [record], self.shown.trained)

    def evaluated(self, step: int, records: Sequence[Record], samples: Sequence[Record]) -> None:
        self._tell(step, records, self.shown.evaluated)
        if samples:
            self.results.append([{**sample, "step": step} for sample in samples], SAMPLES)
            self.shown.sampled(samples)
        for number, sample in enumerate(samples) if self.board else ():
            text = "\n\n".join(f"**{name}**\n\n{value}" for name, value in sample.items())
            self.board.add_text(f"sample {number}", text, step)

    def _tell(self, step: int, records: Sequence[Record], show: Callable[[int, Sequence[Record]], None]) -> None:
        records = [{**record, "step": step, "seconds": round(self.seconds(), 3)} for record in records]
        self.results.append(records)
        show(step, records)
        for record in records if self.board else ():
            prefix = "/".join(value for value in record.values() if isinstance(value, str))
            for name, value in record.items():
                if isinstance(value, int | float) and name not in ("step", "seconds"):
                    self.board.add_scalar(f"{prefix}/{name}" if prefix else name, value, step)
        if self.board:
            self.board.flush()


class Speed:
    """Steps per second of training, without the evaluations in between."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds

    def per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


@contextmanager
def journal(results: Results, start: int, steps: int, before: float, tokens: int | None) -> Iterator[Journal]:
    """The journal of steps `start` + 1 to `steps`."""
    board = None
    if results.run.tensorboard and distributed.is_main():
        require("tensorboard", "lm")
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after its last checkpoint will come again.
        board = SummaryWriter(results.folder / TENSORBOARD, purge_step=start + 1)
    try:
        with display(start, steps, distributed.is_main()) as shown:
            yield Journal(results, shown, board, before, tokens)
    finally:
        if board:
            board.close()
