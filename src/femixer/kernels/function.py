"""Calls of functions with a backward of their own, as cheap as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


def run(function: type[Function], *args: Any) -> Any:
    """`apply` where gradients are recorded, else `forward`; all arguments are given, in order.

    torch's `apply` looks up the signature of `forward` at every call, which takes as long as many a kernel.
    """
    if not torch.is_grad_enabled():
        return function.forward(*args)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]
