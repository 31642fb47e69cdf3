"""FLOPs of a call, as plain torch computes it: the same whatever backend is the fastest for a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from femixer.kernels.dispatch import use_backend


def flops(call: Callable[[], object]) -> int:
    """Multiplications and additions of the matrix products that a call performs, on the plain backend.

    Only shapes matter: a call on device="meta" costs no time and no memory, and counts the same. As is the custom,
    causal attention counts as if it looked at all pairs, its backward pass computes the scores once more, and
    elementwise work, such as a scan per channel, does not count.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU)
    with use_backend("plain"), counter, _FusedAttention():
        call()
    return counter.get_total_flops()


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


# torch counts its fused attention on a GPU, not on a CPU.
_ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
