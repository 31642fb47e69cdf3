"""FLOPs of a call, as plain torch computes it: the same whatever backend is the fastest for a size."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from femixer.baselines.kernels.long_convolution import CHUNK
from femixer.kernels.dispatch import use_backend


def flops(call: Callable[[], object], elementwise: bool = False) -> int:
    """Multiplications and additions of the matrix products (triangular systems and Hyena's filters among them) that a
    call performs, on the plain backend.

    Only shapes matter: a call on device="meta" costs no time and no memory, and counts the same. As is the custom,
    causal attention counts as if it looked at all pairs, its backward pass computes the scores once more, and
    elementwise work, such as a scan per channel, does not count.

    elementwise: count that too, one for each number that an elementwise operation makes or a reduction or a scan
    reads. Then no scan is free, however a compiled kernel carries it out.
    """
    counter, rest = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED), _Elementwise()
    with use_backend("plain"), counter, rest if elementwise else nullcontext(), _FusedAttention():
        call()
    return counter.get_total_flops() + rest.total


class _Elementwise(TorchDispatchMode):
    """Counts what is not a matrix product. Moving numbers is no arithmetic."""

    MOVES = frozenset({"clone", "copy", "copy_", "fill", "fill_", "where", "masked_fill", "masked_fill_"})
    READS = frozenset(
        {"sum", "mean", "amax", "amin", "max", "prod", "cumsum", "cumprod", "cummax", "logcumsumexp", "logsumexp"}
        | {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if torch.Tag.pointwise in func.tags and name not in self.MOVES:
            self.total += _numbers(result)
        elif name in self.READS:
            self.total += _numbers(args[0])
        return result


def _numbers(value: Any) -> int:
    if isinstance(value, Tensor):
        return math.prod(value.shape)
    return sum(map(_numbers, value)) if isinstance(value, (tuple, list)) else 0


class _FusedAttention(TorchFunctionMode):
    """Without data torch writes attention out; as one operation it counts as on a CPU that computes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            query, key, value, *_ = args
            if query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]:
                heads = query.shape[1] // key.shape[1]  # that share a key
                key, value = (x.repeat_interleave(heads, 1) if heads > 1 else x for x in (key, value))
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        return func(*args, **(kwargs or {}))


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def _solve_flops(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
    """A triangular system [..., N, N] with K right sides: N^2 K."""
    return math.prod(right) * matrix[-1]


def _convolution_flops(tokens: Any, products: int, transforms: int) -> int:
    """Hyena's filters over tokens [B, S, C]: so many products with a Toeplitz matrix of a chunk, and for each block of
    2, 4, 8, ... chunks so many Fourier transforms of its N real numbers, 2.5 N log2 N each."""
    batch, length, channels = tokens
    number = 1 << max(0, -(-length // CHUNK) - 1).bit_length()
    chunk = -(-length // number)
    sizes = [2**level * chunk for level in range(1, number.bit_length())]
    each = sum(2.5 * number * chunk * math.log2(size) for size in sizes)
    return batch * channels * int(2 * products * length * chunk + transforms * each)


def _convolution_forward(u: Any, *_: Any, **__: Any) -> int:
    return _convolution_flops(u, products=1, transforms=2)


def _convolution_backward(to_y: Any, *_: Any, **__: Any) -> int:
    return _convolution_flops(to_y, products=2, transforms=3)


# torch counts its fused attention on a GPU, not on a CPU, and neither triangular systems nor our one opaque operator.
_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.linalg_solve_triangular: _solve_flops,
    torch.ops.femixer.long_convolution: _convolution_forward,
    torch.ops.femixer.long_convolution_backward: _convolution_backward,
}
