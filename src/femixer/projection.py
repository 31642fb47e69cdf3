"""Projections of the tokens, several in one matrix product, modulated by the conditioner's features."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from femixer.kernels.modulation import modulation

# Kinds of parameters of the columns, and the parameter that holds all columns side by side.
KINDS = {"weight": "linear.weight", "bias": "linear.bias", "modulation": "modulation"}


def start_map(linear: nn.Linear) -> None:
    """Weights N(0, 0.02), biases zero."""
    nn.init.normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class Start:
    """The reset_parameters of a linear map that is `start`. It holds the map weakly: a cycle would keep the weights of
    a model that nobody has any more. A shallow copy of the map (copy.copy) shares it, as it shares the weights."""

    def __init__(self, linear: nn.Linear, start: Callable[[nn.Linear], None]) -> None:
        self.linear, self.start = weakref.ref(linear), start

    def __call__(self) -> None:
        linear = self.linear()
        assert linear is not None  # whose attribute this is
        self.start(linear)

    def __reduce__(self) -> tuple[type[Start], tuple[nn.Linear, Callable[[nn.Linear], None]]]:
        linear = self.linear()
        if linear is None:
            raise TypeError("a shallow copy of a linear map cannot be pickled without the map; use copy.deepcopy")
        return Start, (linear, self.start)


def starting(linear: nn.Linear, start: Callable[[nn.Linear], None] = start_map) -> nn.Linear:
    """The map, which starts by `start`. Tools that fill a model built without data call reset_parameters of every
    module, some of them from the outside in: torch's would undo the start that the owner of the map has given."""
    linear.reset_parameters = Start(linear, start)  # type: ignore[method-assign]
    return linear


class Columns(NamedTuple):
    """Columns of a projection. The conditioner multiplies them by 1 + eta or, for logits of decays and steps
    (`additive`), adds eta. Their weights start at N(0, 0.02) or, with `zero`, at zero."""

    width: int
    additive: bool = False
    zero: bool = False


def start_columns(columns: dict[str, Columns], linear: nn.Linear) -> None:
    """As `start_map`, but for the columns that start at zero."""
    start_map(linear)
    with torch.no_grad():
        for each, rows in zip(columns.values(), linear.weight.split([c.width for c in columns.values()]), strict=True):
            if each.zero:
                rows.zero_()


class Projection(nn.Module):
    """x [B, T, dim] -> {name: x W + b} [B, T, width] each, modulated by eta = features M; M starts at zero."""

    def __init__(
        self,
        dim: int,
        columns: dict[str, Columns],
        bias: bool,
        conditioner_channels: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Additive columns come last, so that each kind is contiguous.
        self.columns = dict(sorted(columns.items(), key=lambda item: item[1].additive))
        self.scaled = sum(c.width for c in columns.values() if not c.additive)
        total = sum(self.widths)
        self.linear = starting(
            nn.Linear(dim, total, bias=bias, device=device, dtype=dtype), partial(start_columns, self.columns)
        )
        self.modulation: nn.Parameter | None = None
        if conditioner_channels:
            self.modulation = nn.Parameter(torch.empty(total, conditioner_channels, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def widths(self) -> list[int]:
        return [c.width for c in self.columns.values()]

    is_apart = False  # see femixer.pieces

    @property
    def pieces(self) -> dict[str, list[str]]:
        return {whole: [f"{name}.{kind}" for name in self.columns] for kind, whole in KINDS.items()}

    def reset_parameters(self) -> None:
        start_columns(self.columns, self.linear)
        if self.modulation is not None:
            nn.init.zeros_(self.modulation)

    def forward(self, x: Tensor, features: Tensor | None = None) -> dict[str, Tensor]:
        """features [B, T, conditioner_channels], from the conditioner; None without one."""
        projected = self.linear(x)
        if self.modulation is None or features is None:
            pieces = projected.split(self.widths, -1)
        else:
            pieces = modulation(projected, features, self.modulation, self.scaled, self.widths)
        return dict(zip(self.columns, pieces, strict=True))
