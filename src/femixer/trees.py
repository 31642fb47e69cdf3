"""States as trees of tensors (pytrees), above all for torch.export.

The leaves of a state are its tensors and the number of tokens seen; a growing tensor is a leaf without its spare room.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from femixer.kernels.decayed_linear import FastWeights
from femixer.kernels.pair_state_space import PairSums
from femixer.kernels.state_space import Modes
from femixer.layout import Past
from femixer.priors.base import ThreeReads
from femixer.priors.softmax import Cache, Stream
from femixer.state import Growing, State

Context = Any  # what is not a leaf, of numbers and words


def register(
    kind: type, parts: Callable[[Any], tuple[dict[str, Any], Context]], rebuilt: Callable[[list[Any], Context], Any]
) -> None:
    """parts(x) -> (children by name, context); rebuilt(children, context) -> x. The context goes to files as it is."""

    def flatten(x: Any) -> tuple[list[Any], Context]:
        children, context = parts(x)
        return [*children.values()], context

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Context]:
        children, context = parts(x)
        return [(pytree.GetAttrKey(name), child) for name, child in children.items()], context

    pytree.register_pytree_node(
        kind,
        flatten,
        lambda children, context: rebuilt([*children], context),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
        flatten_with_keys_fn=flatten_with_keys,
    )


def register_tuple(kind: type) -> None:
    """A NamedTuple that is a part of states: torch knows neither its name in files nor that it may be loaded."""
    pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    torch.serialization.add_safe_globals([kind])


def _state_parts(state: State) -> tuple[dict[str, Any], Context]:
    children = {"past": state.past, "prior": state.prior, "conditioner": state.conditioner}
    return children, [state.owner, str(state.device), state.batch if _batch(children.values()) is None else None]


def _state(children: list[Any], context: Context) -> State:
    owner, device, batch = context
    found = _batch(children[1:])
    return State(owner, batch if found is None else found, torch.device(device), *children)


def _batch(children: Any) -> int | None:
    """Sequences, as their tensors tell: also where the number of them is not known yet."""
    return next((leaf.shape[0] for leaf in pytree.tree_leaves([*children][::-1]) if isinstance(leaf, Tensor)), None)


register(State, _state_parts, _state)
register(Growing, lambda x: ({"tensor": x.alone()}, None), lambda children, _: Growing.of(children[0]))
for kind in (Past, Cache, Stream, FastWeights, Modes, PairSums, ThreeReads):
    register_tuple(kind)


def any_size(tree: Any) -> Any:
    """The dynamic_shapes of torch.export for a state or a cache of any batch and length: AUTO for every dimension."""
    auto = torch.export.Dim.AUTO
    if isinstance(tree, Tensor):
        return dict.fromkeys(range(tree.dim()), auto)
    if pytree.tree_is_leaf(tree) or tree is None:
        return auto if type(tree) is int else None
    kind = pytree._get_node_type(tree)
    children, _ = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
    sizes = [any_size(child) for child in children]
    return type(tree)(*sizes) if kind is namedtuple else sizes
