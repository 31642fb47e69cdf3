"""Bytes that ranks send each other, and what the formulas of docs/scaling.md say: cases of parallel_cases.py."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from parallel_layers import DIM, PAIRS, mixer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from femixer import FreeEnergyMixer


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "recv" not in str(func):
            given = args[1] if "allgather" in str(func) else args[0]  # a gather writes to its first argument
            self.bytes += sum(x.nbytes for x in ([given] if isinstance(given, Tensor) else given))
        return func(*args, **(kwargs or {}))


def numbers(layer: FreeEnergyMixer) -> int:
    """docs/scaling.md: numbers of float64 that a stretch of one sequence gives to the exchange of its prior's state."""
    (key, value), heads, groups = layer.widths, layer.heads, layer.kv_heads
    prior: Any = layer.prior
    if layer.prior_name == "linear":
        return groups * (key * (2 * value + 1) + value) + 1
    if layer.prior_name == "gla":
        return groups * (key * (2 * value + 1) + value + prior.gates)
    if layer.prior_name in ("aft", "decay"):
        return 4 * heads * value
    if layer.prior_name == "mamba-interactive":
        return heads * (4 * prior.state_size + 1)
    return heads * value * (4 * prior.state_size + 1)


def sent(kind: str, tokens: int) -> list[int]:
    """Bytes that a rank gives in the forward pass on so many tokens per rank, and what the formula says."""
    from femixer.parallel import parallelize

    layer, batch = mixer(kind, torch.float32), 3
    conditioner = 2 * layer.conditioner.channels  # type: ignore[union-attr]
    if kind == "softmax":
        stretches, of_prior = 2, 4 * batch * tokens * layer.kv_heads * sum(layer.widths)
    else:
        stretches, of_prior = 1, 8 * batch * numbers(layer)
    segments = 8 * 4 * batch * stretches + (8 * batch * tokens if kind == "softmax" else 0)
    parallelize(layer, PAIRS["cp"])
    found = []
    for given in ({}, {"segments": torch.zeros(batch, tokens, dtype=torch.long)}):
        with Sent() as counted, torch.no_grad():
            layer(torch.randn(batch, tokens, DIM), **given)
        found.append(counted.bytes)
    formula = of_prior + 8 * batch * stretches * conditioner
    return [*found, formula, formula + segments]


def sent_by_heads(tokens: int) -> list[int]:
    """The same of tensor parallelism, forwards and backwards."""
    from femixer.parallel import parallelize

    layer, batch = mixer("gla", torch.float32), 3
    channels = layer.conditioner.channels  # type: ignore[union-attr]
    parallelize(layer, PAIRS["tp"])
    with Sent() as forwards:
        y = layer(torch.randn(batch, tokens, DIM, requires_grad=True))
    with Sent() as backwards:
        y.sum().backward()
    return [forwards.bytes, backwards.bytes, 4 * batch * tokens * DIM, 4 * batch * tokens * (DIM + channels)]


def sent_around(tokens: int) -> list[int]:
    """The same of the keys and values of a softmax layer that go around a ring, forwards and backwards."""
    from femixer.parallel import parallelize

    layer, batch = mixer("softmax", torch.float32, parts=""), 3
    numbers = batch * tokens * layer.kv_heads * sum(layer.widths)
    parallelize(layer, PAIRS["cp"], ring=True)
    with Sent() as forwards:
        y = layer(torch.randn(batch, tokens, DIM, requires_grad=True))
    weights = sum(p.nbytes for p in layer.parameters())  # whose gradients are added up
    with Sent() as backwards:
        y.sum().backward()
    return [forwards.bytes, backwards.bytes, 4 * numbers, 4 * 3 * numbers + weights]


def traffic(ranks: int) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    if ranks == 2:
        yield "bytes ring", lambda: sent_around(10)
        for kind in ("softmax", "linear", "gla", "gla, channel", "decay", "ssm", "mamba", "mamba-interactive"):
            for tokens in (4, 10):
                yield f"bytes {kind}, {tokens}", lambda kind=kind, tokens=tokens: sent(kind, tokens)  # type: ignore[misc]
        yield "bytes heads", lambda: sent_by_heads(5)
