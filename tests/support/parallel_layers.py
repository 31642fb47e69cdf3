"""The layers, meshes and segments that the cases of parallel_cases.py share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from femixer import FreeEnergyMixer

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"kv_heads": 2},
    "softmax, window": {"window": 5},
    "softmax, bias": {"prior_options": {"score_bias": "alibi"}},
    "fox": {"kv_heads": 2},
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
RANKS, DIM, HEADS, WORDS, STEPS = 4, 24, 4, 29, 20
TOKENS = 24  # stretches of 3 tokens on four ranks
Errors = dict[str, float]


def meshes(names: tuple[str, ...] = ("cp", "tp", "rows")) -> dict[str, Any]:
    """Of two ranks each: the four ranks are two pairs."""
    from torch.distributed.device_mesh import init_device_mesh

    return {name: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", name))[name] for name in names}


PAIRS: dict[str, Any] = {}


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
