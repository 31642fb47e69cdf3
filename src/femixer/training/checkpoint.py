"""Checkpoints: a folder per saved step, complete or absent, of which the newest are kept.

checkpoints/step-00000400/weights.safetensors     the model
                          optimizer.safetensors   the optimizer's state: `parameter:key`
                          checkpoint.json         step, seconds trained, and a checksum of each file

A sharded run writes its state where it is, each process its own: then the first two are `__0_0.distcp`, `__1_0.distcp`,
... and `.metadata` of torch.distributed.checkpoint. Either kind loads into any number of processes, sharded or not.
"""

import json
import math
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from femixer.optional import require
from femixer.pieces import fitting, is_named_otherwise
from femixer.training import atomic, distributed

WEIGHTS, OPTIMIZER, ABOUT = "weights.safetensors", "optimizer.safetensors", "checkpoint.json"
SHARDS = ".metadata"
"""The file that only the checkpoint of a sharded run has."""


@dataclass(frozen=True)
class Position:
    """How far training has come: steps done, and the seconds they took."""

    step: int = 0
    seconds: float = 0.0
    records: Sequence[int] | None = None
    """Length and checksum of metrics.jsonl up to this step; None: not known."""


class Corrupt(Exception):
    """A checkpoint is not what was written."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, position: Position, keep: int = 2) -> None:
    """Save a checkpoint and delete all but the newest `keep`. It must not exist: a step is saved once."""
    path = folder / name_of_step(position.step)
    sharded = any(is_sharded(p) for p in model.parameters())
    try:
        partial = distributed.on_main(lambda: atomic.begin(path, folder=True))
        try:
            if sharded:
                _write_shards(partial, model, optimizer)
            else:
                distributed.on_main(lambda: _write_whole(partial, model, optimizer))
            sums = {name: value for part in distributed.gather(_own_checksums(partial)) for name, value in part.items()}
            distributed.on_main(lambda: _finish(partial, path, position, sums))
        finally:
            if distributed.is_main():
                atomic.remove(partial)
    except Exception as error:  # each library has its own for a full disk
        raise OSError(f"checkpoint {path} could not be saved ({error}); those before it are intact") from error
    if distributed.is_main():
        for old in stored(folder)[keep:]:
            atomic.remove(old)


def restore(folder: Path, model: nn.Module, optimizer: Optimizer) -> Position:
    """Load the newest intact checkpoint into `model` and `optimizer`; without one, change nothing.

    A damaged checkpoint gives a warning, is deleted and the one before it is used. What a crash left unfinished is
    deleted.
    """
    for rest in folder.glob("*" + atomic.PARTIAL) if distributed.is_main() else ():
        atomic.remove(rest)
    for path in distributed.on_main(lambda: stored(folder)):
        try:
            position = verify(path)
        except Corrupt as problem:
            if distributed.is_main():
                warnings.warn(f"checkpoint {path} is damaged ({problem}); going back to the one before", stacklevel=2)
                atomic.remove(path)
            continue
        shards = (path / SHARDS).exists() and not is_named_otherwise(model, _shards_of(path, "model"))
        (_read_shards if shards else _read_whole)(path, model, optimizer)
        return position
    return Position()


def weights(path: Path) -> dict[str, Tensor]:
    """The model's weights in a checkpoint of either kind, on the CPU, without the model."""
    return _whole(path, "model", WEIGHTS)


def _whole(path: Path, kind: str, file: str) -> dict[str, Tensor]:
    """The tensors of the model or of the optimizer, all of them, on the CPU."""
    if not (path / SHARDS).exists():
        return require("safetensors.torch", "cli").load_file(path / file)
    empty = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in _shards_of(path, kind).items()}
    _load_shards(path, {f"{kind}:{name}": tensor for name, tensor in empty.items()})
    return empty


def _read_whole(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """All tensors in every process, also of a model whose heads were divided and are not here, or the other way."""
    held, target = fitting(model, weights(path)), model_state(model)
    _check_same(path, {name: tuple(value.shape) for name, value in held.items()}, target)
    for name, tensor in target.items():
        tensor.copy_(like(tensor, held[name]))
    _fill(model, optimizer, fitting(model, _whole(path, "optimizer", OPTIMIZER)).items())


def verify(path: Path) -> Position:
    """Where the checkpoint stands, or `Corrupt` if a file is missing or differs from what was written."""
    try:
        about = distributed.on_main(lambda: json.loads((path / ABOUT).read_text(encoding="utf-8")))
        sums = sorted(about["crc32"].items())
        records = about.get("records")
        length, value = (0, 0) if records is None else map(int, records)
        known = None if records is None else (length, value)
        position = Position(int(about["step"]), float(about["seconds"]), known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error
    if path.name != name_of_step(position.step) or not math.isfinite(position.seconds):
        raise Corrupt(f"{ABOUT} says step {position.step}, {position.seconds} s")
    own = sums[distributed.rank() :: distributed.world()]
    problems = [problem for problem in distributed.gather(_problem(path, own)) if problem]
    if problems:
        raise Corrupt(problems[0])
    return position


def _problem(path: Path, sums: list[tuple[str, int]]) -> str | None:
    try:
        return next((f"{name} has changed" for name, value in sums if checksum(path / name) != value), None)
    except (OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def name_of_step(step: int) -> str:
    return f"step-{step:08d}"


def stored(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != atomic.PARTIAL), reverse=True)


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, a tied one once."""
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor.detach() for name, tensor in named.items() if first[id(tensor)] == name}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as `parameter:key`; its options come from the experiment and are not kept."""
    return {
        f"{name}:{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _finish(partial: Path, path: Path, position: Position, sums: Mapping[str, int]) -> None:
    about = {"step": position.step, "seconds": position.seconds, "records": position.records, "crc32": sums}
    (partial / ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")
    atomic.commit(partial, path)


def _own_checksums(partial: Path) -> dict[str, int]:
    """Of the files that this process has written: the main one's whole checkpoint, or one process's shards."""
    main, mine = distributed.is_main(), f"__{distributed.rank()}_"
    files = [file for file in partial.iterdir() if file.name.startswith(mine) or (main and file.name[:2] != "__")]
    return {file.name: checksum(file) for file in files}


def _write_whole(partial: Path, model: nn.Module, optimizer: Optimizer) -> None:
    save_file = require("safetensors.torch", "cli").save_file
    for name, state in ((WEIGHTS, model_state(model)), (OPTIMIZER, optimizer_state(model, optimizer))):
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, partial / name)


def _write_shards(partial: Path, model: nn.Module, optimizer: Optimizer) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    state = {f"model:{name}": tensor for name, tensor in model_state(model).items()}
    state |= {f"optimizer:{key}": tensor for key, tensor in optimizer_state(model, optimizer).items()}
    try:
        state_dict_saver.save(state, checkpoint_id=partial, process_group=distributed.control_group())
    except CheckpointException as error:  # which is no Exception
        raise OSError("; ".join(str(failure[0]) for failure in error.failures.values())) from error


def _read_shards(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    target, parameters = model_state(model), dict(model.named_parameters())
    _check_same(path, {name: tuple(entry.size) for name, entry in _shards_of(path, "model").items()}, target)
    moments = {}
    for key, entry in _shards_of(path, "optimizer").items():
        parameter = parameters[key.partition(":")[0]]
        same = parameter.shape == entry.size
        moments[key] = torch.zeros_like(parameter) if same else torch.empty(entry.size, dtype=entry.properties.dtype)
    named = (("model", target), ("optimizer", moments))
    _load_shards(path, {f"{kind}:{name}": tensor for kind, tensors in named for name, tensor in tensors.items()})
    _fill(model, optimizer, moments.items())


def _shards_of(path: Path, kind: str) -> dict[str, Any]:
    """Size and type of the tensors of the model, or of the optimizer, in the checkpoint of a sharded run."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    held = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key.removeprefix(f"{kind}:"): entry for key, entry in held.items() if key.startswith(f"{kind}:")}


def _load_shards(path: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state`, each process its part of them."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended in one process
        group = distributed.control_group()
        load(state, checkpoint_id=path, process_group=group, no_dist=group is None)


def _fill(model: nn.Module, optimizer: Optimizer, state: Iterable[tuple[str, Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in state:
        name, _, entry = key.rpartition(":")
        optimizer.state[parameters[name]][entry] = like(parameters[name], value)


def like(target: Tensor, value: Tensor) -> Tensor:
    """`value` where `target` is: on its device, and divided among the processes as it is, if their shapes agree."""
    if target.shape != value.shape or is_sharded(value):
        return value
    value = value.to(target.device)
    if not is_sharded(target):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has read all of it, so none has to be told its share.
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]


def _check_same(path: Path, held: Mapping[str, tuple[int, ...]], target: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in target.items()}
    names = [name for name in {**wanted, **held} if held.get(name) != wanted.get(name)]
    if names:
        first = names[0]
        shapes = f"{first} is {held.get(first, 'missing')} there and {wanted.get(first, 'missing')} in the model"
        raise ValueError(f"checkpoint {path} is of another model: {shapes} ({len(names)} such weights)")
