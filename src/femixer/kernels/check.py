"""Whether a backend computes what an operator's definition says: results and gradients, relative to their size.

The page of an operator, its folder's __init__.py, has `definition(*arguments)`, the results in float64, written so that
autograd goes through it, and `examples()`, small arguments by name that reach what the operator can do. It may have
TOLERANCES = {dtype: Tolerance(...)} where those of this file do not fit.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels import dispatch
from femixer.kernels.dispatch import use_backend
from femixer.kernels.operator import OPERATORS, Operator


class Errors(NamedTuple):
    """The largest differences to the definition: of results, and of gradients by the name of their argument."""

    results: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        return max([self.results, *self.gradients.values()])


class Tolerance(NamedTuple):
    """The largest errors allowed, of results and of gradients."""

    results: float
    gradients: float


TOLERANCES = {torch.float32: Tolerance(1e-5, 1e-4), torch.float64: Tolerance(1e-9, 1e-8)}


def page(operator: Operator) -> Any:
    """The module with an operator's definition and examples."""
    return importlib.import_module(operator.package)


def tolerance(operator: Operator, dtype: torch.dtype) -> Tolerance:
    own: dict[torch.dtype, Tolerance] = getattr(page(operator), "TOLERANCES", {})
    return own.get(dtype, TOLERANCES[dtype])


def find_operators(*packages: str) -> list[Operator]:
    """Import every operator in these packages, however deep, and return them by name."""
    for package in packages:
        for each in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if each.ispkg:
                importlib.import_module(each.name)
    inside = tuple(f"{package}." for package in packages)
    return [operator for _, operator in sorted(OPERATORS.items()) if operator.package.startswith(inside)]


def cast(arguments: tuple[Any, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> tuple[Any, ...]:
    """Arguments on a device, those of float32 in this type; what is float64 already (states) stays that."""
    moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in moved)


def compare(operator: Operator, backend: str, arguments: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> Errors:
    """Run an operator on a backend with floating-point arguments of this type, and compare with its definition."""
    arguments = cast(arguments, dtype, dispatch.device_of(arguments))
    expected, wanted = _run(page(operator).definition, operator, arguments, torch.float64)
    with use_backend(backend):
        results, gradients = _run(operator, operator, arguments, None)
    return Errors(
        max(_difference(a, b) for a, b in zip(results, expected, strict=True)),
        {name: _difference(gradients[name], wanted[name]) for name in wanted},
    )


def _run(
    function: Any, operator: Operator, arguments: tuple[Any, ...], wide: torch.dtype | None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results that are not internal, and the gradients of a fixed random functional of them."""
    given: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point():
            x = _copy(x).requires_grad_() if wide is None else x.detach().to(wide).requires_grad_()
        given.append(x)
    outputs = list(function(*given))[: len(operator.results(*arguments)) - operator.internal]
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        if not y.is_floating_point():
            continue
        # Drawn for every result: which of them have a gradient is not the same in every backend.
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
        if y.requires_grad:
            # What a result says of nothing (-inf) has no gradient.
            seen = torch.isfinite(y.detach())
            total = total + (torch.where(seen, y, 0).double() * weights).sum()
    inputs = {operator.arguments[i]: x for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad}
    gradients: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(inputs.items(), gradients, strict=True)
    }
    return [y.detach() for y in outputs], found


def _copy(x: Tensor) -> Tensor:
    """With the strides of x, which a kernel may get wrong; repeated numbers are written out."""
    x = x.detach()
    if 0 in x.stride():
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number, or to one; infinite where one is not finite alone."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    finite = b[torch.isfinite(b)]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return float(difference.max()) / scale
