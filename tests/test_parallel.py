"""Several ranks compute what one computes: sequences, heads and batches divided over them.

`python test_parallel.py FOLDER RANK RANKS` is one of the ranks, spawned and connected through gloo. Every rank computes
the result of one process itself and writes down how far its part of the divided one is away.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from femixer import FreeEnergyMixer

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"kv_heads": 2},
    "softmax, window": {"window": 5},
    "softmax, bias": {"prior_options": {"score_bias": "alibi"}},
    "linear": {"kv_heads": 2},
    "gla": {"kv_heads": 2},
    "gla, channel": {"prior_options": {"decay": "channel"}},
    "aft": {},
    "decay": {},
    "ssm": {"prior_options": {"state_size": 3}},
    "mamba": {"prior_options": {"state_size": 3}},
    "mamba, not normalized": {"prior_options": {"state_size": 3, "normalize": False}},
    "mamba-interactive": {"prior_options": {"state_size": 3}},
}
DIM, HEADS, WORDS, STEPS = 24, 4, 29, 20
TOKENS = 24  # stretches of 3 tokens on four ranks
Errors = dict[str, float]


def mixer(kind: str, dtype: torch.dtype, **options: Any) -> FreeEnergyMixer:
    from femixer.priors import Alibi

    torch.manual_seed(0)
    options = {**KINDS[kind], **options}
    if "score_bias" in options.get("prior_options", {}):
        options["prior_options"] = {"score_bias": Alibi(HEADS)}
    layer = FreeEnergyMixer(DIM, HEADS, prior=kind.split(",")[0], dtype=dtype, **options)
    return disturbed(layer)


def disturbed(model: Any) -> Any:
    """With every path in use: no parameter is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def ids() -> Tensor:
    """Segments that end at cuts, before and behind them, some within one stretch; padding at both ends and inside."""
    segments = torch.tensor([[0] * 7 + [1] * 2 + [2] * 11 + [3] * 4, [5] * TOKENS, [0] * 6 + [1] * 6 + [2] * 12])
    for row, places in ((0, [3, 11, 12, 13]), (1, [*range(6), 9, *range(20, TOKENS)])):
        segments[row, places] = -1
    return segments


GIVEN: dict[str, Callable[[], dict[str, Tensor]]] = {
    "nothing": dict,
    "mask": lambda: {"mask": ids() >= 0},
    "segments": lambda: {"segments": ids()},
}


def relative(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Relative to the largest number, but to no less than `scale`: some gradients are zero but for rounding."""
    return float((actual - expected).detach().abs().max() / max(float(expected.detach().abs().max()), scale))


def same_as_alone(layer: FreeEnergyMixer, mesh: Any, given: dict[str, Tensor]) -> Errors:
    """Distances of the output and of all gradients of a divided mixer from those of one process."""
    from femixer.parallel import full_state_dict, own_tokens, parallelize

    dtype = layer.out_proj.weight.dtype
    x, weight = torch.randn(2, 3, TOKENS, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))
    alone = x.clone().requires_grad_()
    y = layer(alone, **given)
    (y * weight).sum().backward()
    assert alone.grad is not None
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in expected.values())
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    parallelize(layer, mesh)
    part = own_tokens(layer, x).requires_grad_()
    out = layer(part, **{name: own_tokens(layer, value) for name, value in given.items()})
    (out * own_tokens(layer, weight)).sum().backward()
    assert part.grad is not None
    errors = {
        "output": relative(out, own_tokens(layer, y), 0),
        "x": relative(part.grad, own_tokens(layer, alone.grad), 0),
    }
    held = full_state_dict(layer)
    assert set(held) == set(before)
    assert all(torch.equal(held[name], before[name]) for name in before)
    with torch.no_grad():
        for parameter in layer.parameters():  # a gradient is divided as its parameter is
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    for name, grad in full_state_dict(layer).items():
        errors[name] = relative(grad, expected[name], 1e-3 * largest)
    return errors


def mixers(ranks: int) -> Iterator[tuple[str, Callable[[], Errors]]]:
    from torch.distributed.device_mesh import init_device_mesh

    def case(kind: str, given: str, mesh: Any, dtype: torch.dtype, **options: Any) -> Callable[[], Errors]:
        return lambda: same_as_alone(mixer(kind, dtype, **options), mesh, GIVEN[given]())

    if ranks == 2:
        cp, tp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("cp", "tp"))
        for kind in KINDS:
            for causal in (True, False):
                for given in ("nothing", "segments") if causal else ("mask", "segments"):
                    name = f"cp {kind}, {'causal' if causal else 'encoder'}, {given}"
                    yield name, case(kind, given, cp, torch.float64, causal=causal)
            yield f"cp {kind}, float32", case(kind, "segments", cp, torch.float32)
            yield f"cp {kind}, the mean alone", case(kind, "mask", cp, torch.float64, parts="")
            if kind != "softmax, bias":
                yield f"tp {kind}", case(kind, "segments", tp, torch.float64)
    else:
        cp = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        for kind in KINDS:
            yield f"cp {kind}, segments", case(kind, "segments", cp, torch.float64)
        for kind in ("softmax", "gla", "mamba"):
            yield f"cp {kind}, encoder", case(kind, "segments", cp, torch.float64, causal=False)
            yield f"cp and tp {kind}", case(kind, "segments", both, torch.float64)


# One rank


def attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def process(folder: Path, rank: int, ranks: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / f'meeting {ranks}'}", timedelta(seconds=120)
    distributed.init_process_group("gloo", meeting, patience, world_size=ranks, rank=rank)
    only = os.environ.get("ONLY", "")
    outcome = {name: attempt(action) for name, action in mixers(ranks) if only in name}
    (folder / f"{ranks} {rank}.json").write_text(json.dumps(outcome))
    distributed.destroy_process_group()


if __name__ == "__main__":
    process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
