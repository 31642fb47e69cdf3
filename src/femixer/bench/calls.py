"""What the clock runs around: a layer on a sequence, its training step, a layer that goes on token by token; training
steps and generation of whole models; and what a call costs besides time: the most bytes that it holds at one time, and
its FLOPs in plain torch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from femixer.baselines.kernels.long_convolution import CHUNK
from femixer.bench.measure import MixerOptions, no_garbage_collection, stopwatch, synchronize
from femixer.kernels import reading
from femixer.kernels.dispatch import use_backend
from femixer.state import Growing
from femixer.training import adamw


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch holds at one time during the call, beyond what it held before.

    On a CPU it is exact and repeatable: the running sum of every allocation and release that torch's allocator reports,
    those inside custom operators and compiled code included. What a library takes for itself (the packing buffers of a
    matrix product, the scratch arrays of femixer's numba kernels) does not pass through that allocator.
    """
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's own library announces each start and stop on standard error, unless told otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with no_garbage_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return highest_sum(_allocations(recorded))


def highest_sum(allocations: Iterable[tuple[int, int]]) -> int:
    """The most bytes live at one time, from (address, bytes) in order; negative bytes release the address.

    Releases of what was allocated before the record began do not count.
    """
    live: dict[int, int] = {}
    total = highest = 0
    for address, size in allocations:
        if size > 0:
            live[address] = size
            total += size
        else:
            total -= live.pop(address, 0)
        highest = max(highest, total)
    return highest


def _allocations(recorded: profile) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the CPU allocations and releases, in the order they happened."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    on_cpu = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    for event in sorted(on_cpu, key=lambda e: e["ts"]):
        yield event["args"]["Addr"], event["args"]["Bytes"]


def held_bytes(value: Any) -> int:
    """Bytes of the tensors in a streaming state; of a buffer with room to grow, what is filled."""
    leaves = tree_leaves(value, is_leaf=lambda each: isinstance(each, Growing))
    tensors = (leaf.tensor if isinstance(leaf, Growing) else leaf for leaf in leaves)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


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
    also = rest if elementwise else nullcontext()
    with use_backend("plain"), _without_data_as_on_a_cpu(), counter, also, _FusedAttention():
        call()
    return counter.get_total_flops() + rest.total


@contextmanager
def _without_data_as_on_a_cpu() -> Iterator[None]:
    """Plain torch takes the same form on meta tensors as on a CPU: that of other devices multiplies more numbers in
    fewer operations."""
    before = reading.FLOAT64
    reading.FLOAT64 = (*before, "meta")
    try:
        yield
    finally:
        reading.FLOAT64 = before


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


def _convolution_flops(tokens: Any, products: int, transforms: int) -> int:
    """Hyena's filters over tokens [B, S, C]: so many products with a Toeplitz matrix of a chunk, and for each block of
    2, 4, 8, ... chunks so many Fourier transforms of its N real numbers, 2.5 N log2 N each."""
    batch, length, channels = tokens
    number = 1 << max(0, -(-length // CHUNK) - 1).bit_length()
    chunk = -(-length // number)
    sizes = [2**level * chunk for level in range(1, number.bit_length())]
    each = sum(2.5 * number * chunk * math.log2(size) for size in sizes)
    return batch * channels * int(2 * products * length * chunk + transforms * each)


# torch counts its fused attention on a GPU, not on a CPU, and neither triangular systems nor our one opaque operator.
_UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
    # [..., N, N] with K right sides: N^2 K.
    torch.ops.aten.linalg_solve_triangular: lambda matrix, right, *_, **__: math.prod(right) * matrix[-1],
    torch.ops.femixer.long_convolution: lambda u, *_, **__: _convolution_flops(u, products=1, transforms=2),
    torch.ops.femixer.long_convolution_backward: (
        lambda to_y, *_, **__: _convolution_flops(to_y, products=2, transforms=3)
    ),
}


class Call(NamedTuple):
    """function: the layer itself, or the layer compiled; x [B, T, dim] and the gradient of the layer's output."""

    function: Callable[[Tensor], Tensor]
    layer: nn.Module
    x: Tensor
    gradient: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(self.x)

    def train(self) -> None:
        self.function(self.x).backward(self.gradient)

    def clear(self) -> None:
        """Drop the gradients, so that every step allocates them anew, as training does."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def train_and_clear(self) -> None:
        self.train()
        self.clear()

    def time_forward(self) -> float:
        return stopwatch(self.forward, self.x.device)

    def time_training(self) -> float:
        seconds = stopwatch(self.train, self.x.device)
        self.clear()
        return seconds


class Decoder(NamedTuple):
    """A layer and its state after a context. The state is never continued twice: that would copy a cache.

    state_bytes: of one sequence, after the context; grows: whether one more token made it larger.
    """

    layer: nn.Module
    state: Any
    tokens: Tensor  # [steps, B, 1, dim]
    state_bytes: float
    grows: bool

    @classmethod
    def after(cls, layer: nn.Module, context: int, batch: int, options: MixerOptions) -> Decoder:
        prompt = torch.randn(batch, context, options.dim, **options.tensors)
        tokens = torch.randn(options.decode_steps, batch, 1, options.dim, **options.tensors)
        with torch.inference_mode():
            _, state = layer(prompt, return_state=True)
            size = held_bytes(state)
            # A cache gets room to grow with its first new token, which therefore costs more than the others.
            _, state = layer(tokens[0], state=state, return_state=True)
        return cls(layer, state, tokens, size / batch, held_bytes(state) > size)

    def at(self, position: int) -> Decoder:
        """The same as if `position` tokens had been seen: for a state of FEM that does not grow with them."""
        past = self.state.past._replace(seen=position)
        return self._replace(state=dataclasses.replace(self.state, past=past))

    def time(self) -> float:
        """Seconds per token."""
        with torch.inference_mode():
            state = copy.deepcopy(self.state)

            def steps() -> None:
                nonlocal state
                for token in self.tokens:
                    _, state = self.layer(token, state=state, return_state=True)

            return stopwatch(steps, self.tokens.device) / len(self.tokens)


class Training(NamedTuple):
    """A model that is trained while the clock runs.

    call: the model itself, or the model compiled; batch: its arguments, the same in every step; loss: of its output.
    """

    call: Callable[..., Any]
    optimizer: Optimizer
    batch: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    parameters: int
    device: torch.device

    @classmethod
    def start(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        compiled: bool = False,
        loss: Callable[[Any], Tensor] = lambda output: output.loss,
    ) -> Training:
        call = torch.compile(model.train(), dynamic=False) if compiled else model.train()
        device = next(model.parameters()).device
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(call, adamw(model, learning_rate=1e-4, fused=True), batch, loss, parameters, device)

    def step(self) -> None:
        """Forward, backward and a step of AdamW."""
        self.loss(self.call(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self) -> float:
        return stopwatch(self.step, self.device)


class Clock:
    """A streamer of transformers: notes when generate() hands out the prompt and then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())  # the tokens come from the device, which has therefore finished them

    def end(self) -> None:
        pass

    def seconds_per_token(self) -> float:
        """The median; the first token does not count, before which generate() prepares itself."""
        _, *tokens = self.times
        return statistics.median(after - before for before, after in pairwise(tokens))


class Generator(NamedTuple):
    """A model and its cache of all `tokens` [B, context + 1] but the last; each sample goes on from a copy of it.

    cache_bytes: of one sequence, after the context; grows: whether the last token of the context made it larger.
    """

    model: Any
    cache: Any
    tokens: Tensor
    steps: int
    cache_bytes: float
    grows: bool

    @classmethod
    @torch.no_grad()  # as generate() does: what is made in inference mode could only be copied there
    def after(cls, model: Any, tokens: Tensor, steps: int) -> Generator:
        """tokens [B, context + 1]; steps: tokens of a sample."""
        context = tokens.shape[1] - 1
        before = model(tokens[:, : context - 1], use_cache=True, logits_to_keep=1).past_key_values
        size = cache_bytes(before)
        # A cache may get room to grow with its first new token, which therefore costs more than the others.
        cache = model(tokens[:, context - 1 : context], past_key_values=before, use_cache=True).past_key_values
        return cls(model, cache, tokens, steps, cache_bytes(cache) / len(tokens), cache_bytes(cache) > size)

    def time(self) -> float:
        """Seconds for a token of every sequence."""
        clock, cache = Clock(), copy.deepcopy(self.cache)
        self.model.generate(
            self.tokens,
            attention_mask=torch.ones_like(self.tokens),
            past_key_values=cache,
            max_new_tokens=self.steps + 1,
            do_sample=False,
            use_cache=True,
            streamer=clock,
        )
        return clock.seconds_per_token()


def cache_bytes(cache: Any) -> int:
    """Of ours, or of transformers' with keys and values."""
    return held_bytes(getattr(cache, "states", None) or [(layer.keys, layer.values) for layer in cache.layers])
