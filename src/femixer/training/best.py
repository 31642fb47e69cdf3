"""Early stopping, and the weights of the best evaluation, also across a crash."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from femixer.optional import require
from femixer.training import atomic, distributed
from femixer.training.engine import full_weights
from femixer.training.results import CHECKPOINTS, Record, Results

Error = tuple[float, ...]
"""What is compared: the first number, the next where that is equal, and so on; lower is better."""


class Best:
    """Keeps the weights of the evaluation with the lowest error, the first of equals.

    Which that is, only metrics.jsonl says, whatever was interrupted in between. The weights are in
    checkpoints/best-STEP.safetensors before the checkpoint of their step is, and those of the best before stay as long
    as a resumed run may go back to them.
    """

    def __init__(
        self,
        model: nn.Module,
        results: Results,
        error: Callable[[Record], Error],
        patience: float = math.inf,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """error:    of a record of the validation split.
        patience: evaluations without a better one after which training ends.
        weights:  those to keep of the last evaluation, by default the model's; called in all processes.
        """
        self.model, self.results, self.error, self.patience = model, results, error, patience
        self.weights = weights or (lambda: full_weights(model))

    def enough(self, records: Sequence[Record]) -> bool:
        """Told after each evaluation: save the weights if it is the best, and say if it is time to stop."""
        scores = distributed.on_main(self.scores)
        best, last = lowest(scores), max(scores)
        if best == last:
            weights = self.weights()
            earlier = {step: value for step, value in scores.items() if step < last}
            keep = {best, lowest(earlier)} if earlier else {best}
            distributed.on_main(lambda: self._save(weights, best, keep))
        return sum(step > best for step in scores) >= self.patience

    def scores(self) -> dict[int, Error]:
        """step -> validation error."""
        return {r["step"]: self.error(r) for r in self.results.metrics() if r.get("split") == "validation"}

    def load(self) -> int:
        """Put the best weights into the model; the step they are from."""
        scores = distributed.on_main(self.scores)
        if not scores:
            raise FloatingPointError(f"out={str(self.results.folder)!r}: no evaluation is finite, not even the first")
        step = lowest(scores)
        self.model.load_state_dict(require("safetensors.torch", "cli").load_file(self._path(step)))
        return step

    def _save(self, weights: Mapping[str, Tensor], step: int, keep: set[int]) -> None:
        path = self._path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as partial:
            require("safetensors.torch", "cli").save_file({k: v.contiguous() for k, v in weights.items()}, partial)
        kept = {self._path(each) for each in keep}
        for other in path.parent.glob("best-*.safetensors"):
            if other not in kept:
                atomic.remove(other)

    def _path(self, step: int) -> Path:
        return self.results.folder / CHECKPOINTS / f"best-{step:08d}.safetensors"


def check_trained(record: Record, saved: str = "") -> None:
    """A FloatingPointError if training diverged: a command that trains one model must not end as if it had gone well.

    record: has `diverged`, why, and `best_step`, 0 for the untrained weights. saved: where the best weights are now.
    """
    if record["diverged"] and (saved or not record["best_step"]):
        kept = f"the weights of step {record['best_step']}, the best before, are in {saved}"
        kept = kept if record["best_step"] else "no weights were better than the untrained ones, and no model is saved"
        raise FloatingPointError(f"training diverged: {record['diverged']}; {kept}")


def untrained_note(record: Record) -> list[str]:
    """What a table says if no evaluation was better than that of the untrained weights, which are the ones kept."""
    kept = not record["best_step"] and record["steps"] and not record["diverged"]
    return ["No evaluation was better than that of the untrained weights, which are the ones kept."] if kept else []


def lowest(scores: Mapping[int, Error]) -> int:
    """The first step of the lowest error; NaN is above all numbers."""
    return min(scores, key=lambda step: (any(map(math.isnan, scores[step])), scores[step], step))
