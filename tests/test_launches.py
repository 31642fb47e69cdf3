"""A layer in plain torch on a device that is not a CPU: few operations, little memory, and no question to the device.

Counted on tensors without data (benchmarks/launches.py) at 4096 tokens, dim 512 and 8 heads.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

PATH = Path(__file__).parent.parent / "benchmarks" / "launches.py"
spec = importlib.util.spec_from_file_location("launches", PATH)
assert spec is not None and spec.loader is not None
launches: Any = importlib.util.module_from_spec(spec)
sys.modules["launches"] = launches
spec.loader.exec_module(launches)

# The most operations of the forward and of the backward pass, and the highest peak as a multiple of attention's. The
# aim is 120, 160 and 3 for every prior; until then they may only become fewer.
MOST = {
    "softmax": (87, 130, 2.0),
    "fox": (117, 186, 3.0),
    "linear": (120, 198, 2.7),
    "gla": (150, 234, 2.8),
    "gla:decay=channel": (217, 351, 3.7),
    "aft": (80, 154, 2.9),
    "decay": (83, 155, 3.0),
    "ssm": (157, 359, 4.3),
    "mamba": (168, 363, 6.8),
    "mamba:normalize=false": (172, 378, 6.9),
    "mamba-interactive": (141, 245, 2.9),
}
# Memory kept for the backward pass, as a multiple of attention's.
KEPT = 3.0

measure = cache(launches.measure)
PRIORS = [kind for kind in launches.KINDS if kind != launches.ATTENTION]
each_prior = pytest.mark.parametrize("prior", PRIORS)


@each_prior
def test_few_operations_are_launched(prior: str) -> None:
    cost = measure(prior)
    assert cost.forward <= MOST[prior][0]
    assert cost.backward <= MOST[prior][1]


@each_prior
def test_little_is_kept_for_the_backward_pass_and_held_at_the_peak(prior: str) -> None:
    cost, attention = measure(prior), measure(launches.ATTENTION)
    assert cost.saved <= KEPT * attention.saved
    assert cost.peak <= MOST[prior][2] * attention.peak


@each_prior
def test_operations_do_not_grow_with_the_length(prior: str) -> None:
    """Four times the tokens may cost a few levels of a tree, but no step per token or per chunk. State spaces, whose
    modes are many numbers per token, take more blocks of channels, and decays of scores, which are a mask, more blocks
    of rows, so that memory stays bounded."""
    short, long = launches.measure(prior, 1024), measure(prior)
    blocks = 3 if prior.startswith(("ssm", "mamba")) else 2 if prior == "fox" else 1
    assert long.forward <= blocks * short.forward + 16
    assert long.backward <= blocks * short.backward + 24


def test_counters_count_what_can_be_worked_out_by_hand() -> None:
    x = torch.empty(1000, device="meta", requires_grad=True)
    with launches.Memory([x]) as memory, launches.Operations() as operations:
        y = x + x  # 4000 bytes
        z = (y.view(10, 100) * 2).T  # 8000
        del y  # 4000
        w = torch.cat([z, z])  # 12000
        del z
    assert operations.count == 3
    assert operations.names == ["aten.add.Tensor", "aten.mul.Tensor", "aten.cat.default"]
    assert operations.lines == {"autograd": ["add", "mul", "cat"]}  # no line of the package
    assert memory.peak == 12000
    assert memory.live == 8000
    del w
    assert memory.live == 0


def test_attention_keeps_what_it_must() -> None:
    """Queries, keys, values and the output of attention, and one number per head and token."""
    tokens = launches.LENGTH
    kept = 4 * tokens * (4 * launches.DIM + launches.HEADS)
    assert kept <= measure(launches.ATTENTION).saved <= 1.2 * kept
