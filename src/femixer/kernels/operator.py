"""An operator, declared once: its results, its custom op for compilers, its autograd, and the call of its backends.

A backend is a module with

    forward(*arguments) -> tuple of the results
    backward(grads, arguments, results, needed) -> tuple with the gradient of each tensor argument, or None
    FLOATS, the float types of which it takes one throughout; STATES, arguments that are float64 always; and ANY,
    arguments of any type                                                                     (optional)
    refuse(*arguments) -> why it cannot serve these arguments otherwise, or None              (optional)

`grads` has None for a result that nobody used (see `filled`), or zeros with FILLED = True, for a backend that keeps all
results. `needed` says of each argument whether its gradient is wanted. Without `backward` the forward pass is run again
with gradients, so nothing but the arguments is kept; with READS_RESULTS = False they alone are kept too, and a slice
says which results are kept. READS_ARGUMENTS names the arguments that `backward` reads if not all (it gets None for the
others). With REMADE = True, or REMADE(*arguments), the results take so little to compute that other operators keep the
arguments instead of them, where they can. With DIFFERENTIABLE = True autograd records the forward pass itself, which
then needs no internal results. A plain forward is made of torch's operations only, none of them in place on an
argument: compilers and torch.func see through it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from femixer.kernels import dispatch

# The words of torch's operator schemas for Python's annotations.
_SCHEMA = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "list[int]": "SymInt[]",
    "torch.dtype": "ScalarType",
}
_TENSORS = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")
_are_transforms_active, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_is_autocast = torch._C._is_any_autocast_enabled

OPERATORS: dict[str, Operator] = {}


class Operator:
    """Call it with the arguments of `results`, all of them and in order; it returns the tuple of results.

    results(*arguments) -> empty tensors of the results' shapes and types. Its annotations are the operator's signature.
    There are as many as `outputs`, or with outputs=None as many as the arguments say; what an operator does not compute
    for some arguments is an empty tensor, not None. The last `internal` of them are kept for the backward only.
    fusible: a compiler does better by fusing the plain form than by calling a kernel. gradients=False: nothing is
    recorded, as in a step of decoding. composed: the plain form is made of other operators, each of which chooses its
    backend; it stands in for one that does not serve the whole.
    """

    def __init__(
        self,
        package: str,
        results: Callable[..., tuple[Tensor, ...]],
        outputs: int | None = 1,
        *,
        internal: int = 0,
        fusible: bool = False,
        gradients: bool = True,
        composed: bool = False,
        left_to_torch: str = "torch's own operations are as fast",
    ) -> None:
        self.package, self.name = package, package.rpartition(".")[2]
        if self.name in OPERATORS and OPERATORS[self.name].package != package:
            raise ValueError(f"operator={self.name!r} exists already, in {OPERATORS[self.name].package}")
        self.results, self.outputs, self.internal, self.fusible = results, outputs, internal, fusible
        self.gradients, self.composed, self.left_to_torch = gradients, composed, left_to_torch
        parameters = inspect.signature(results).parameters
        self.arguments = tuple(parameters)
        kinds = [_SCHEMA[str(p.annotation)] for p in parameters.values()]
        self.tensors = tuple(i for i, kind in enumerate(kinds) if kind.startswith("Tensor"))
        # The plain form at once: a compiler that traces a call cannot import. It is in plain.py, or on the page itself.
        apart = importlib.util.find_spec(f"{package}.plain")
        plain = importlib.import_module(f"{package}.plain") if apart else sys.modules[package]
        self.implementations: dict[str, Any] = {"plain": plain}
        self._function = _autograd_function(self)
        self._operation = _custom_op(self, kinds)
        OPERATORS[self.name] = self

    def implementation(self, backend: str) -> ModuleType | None:
        """The module of a backend, imported when it is first asked for; None if the operator has none."""
        if backend not in self.implementations:
            name = f"{self.package}.{dispatch.FILES[backend]}"
            found = importlib.util.find_spec(name)
            self.implementations[backend] = None if found is None else importlib.import_module(name)
        return self.implementations[backend]

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The results, with the internal ones. Most of the time of small models is this way, so it is short."""
        graph = torch.is_grad_enabled()
        if graph and not self.gradients:
            with torch.no_grad():
                return self(*arguments)
        if torch.compiler.is_compiling():
            return self._seen_through(arguments, not self.fusible and dispatch.asked() != "plain")
        recorded, first = False, None
        for i in self.tensors:
            x = arguments[i]
            if x is None:
                continue
            if type(x) not in _TENSORS:
                # Without data, shapes of results are known; other kinds of tensors have operations of their own.
                return self._seen_through(arguments, any(isinstance(arguments[i], FakeTensor) for i in self.tensors))
            first = x if first is None else first
            recorded = recorded or (graph and x.requires_grad)
        # Someone may follow torch's own operations and would lose sight of kernels: torch.func, forward mode, jit.
        if _are_transforms_active() or forward_ad._current_level >= 0 or _tracing() is not None:
            return self.plain(arguments)
        device = _CPU if first is None else first.device
        if _is_autocast():
            with without_autocast(device):
                return self._run(arguments, device, recorded)
        return self._run(arguments, device, recorded)

    def _run(self, arguments: tuple[Any, ...], device: torch.device, recorded: bool) -> tuple[Tensor, ...]:
        asked = dispatch.ASKED.name or dispatch.ENVIRONMENT
        for name in dispatch.CANDIDATES.get((asked, device)) or dispatch.candidates(asked, device):
            backend = self.implementations.get(name) or self.implementation(name)
            if backend is not None and self.refusal(backend, arguments) is None:
                break
        else:
            backend = dispatch.choose(self, arguments)  # which says why none serves
        known = backend.__dict__
        if recorded and not known.get("DIFFERENTIABLE", False):
            # Function.apply would look up the signature of `forward` first, which takes as long as many a kernel.
            results = super(torch.autograd.Function, self._function).apply(backend, *arguments)  # type: ignore[misc]
            remade = known.get("REMADE", False)
            if remade and (remade is True or remade(*arguments)):
                for i, result in enumerate(results):
                    result.remade = backend, arguments, i, result._version
            return results
        return known["forward"](*arguments)

    def refusal(self, backend: Any, arguments: tuple[Any, ...]) -> str | None:
        """Why a backend's file does not serve these arguments, or None: their types first, then what it says itself."""
        known = backend.__dict__
        floats = known.get("FLOATS")
        if floats is not None:
            states, free, kind = known.get("STATES", ()), known.get("ANY", ()), None
            for i in self.tensors:
                x = arguments[i]
                if x is None or self.arguments[i] in free:
                    continue
                if not x.numel():
                    return f"{self.arguments[i]} is empty"
                found = x.dtype
                if states and self.arguments[i] in states:
                    if found is not torch.float64:
                        return f"it takes {self.arguments[i]} of float64, not {found}"
                elif kind is None and found in floats:
                    kind = found
                elif found is not kind and found.is_floating_point:
                    allowed = " or ".join(str(each).removeprefix("torch.") for each in floats)
                    return f"it takes {allowed} throughout, not {self.arguments[i]} of {found}"
        refuse = known.get("refuse")
        return None if refuse is None else refuse(*arguments)

    def plain(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The plain forward as torch's own operations, through which gradients and transforms go by themselves."""
        with without_autocast(dispatch.device_of(arguments)):
            return self.implementations["plain"].forward(*arguments)

    def _seen_through(self, arguments: tuple[Any, ...], opaque: bool) -> tuple[Tensor, ...]:
        """As one operation that a compiler knows, or as those that the plain form is made of."""
        if not opaque:
            return self.plain(arguments)
        results = self._operation(*arguments, dispatch.asked())
        return (results,) if isinstance(results, Tensor) else tuple(results)


P = ParamSpec("P")
R = TypeVar("R")


class Function(Generic[P, R]):
    """An operator as the function that people call: without its internal results, and one result alone by itself."""

    def __init__(self, declaration: Callable[P, R], operator: Operator) -> None:
        functools.update_wrapper(self, declaration)
        self.operator, self._signature = operator, inspect.signature(declaration)
        self._parameters = [(p.name, p.default) for p in self._signature.parameters.values()]
        self._alone = operator.outputs == 1

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        given: Any = arguments
        if named or len(given) != len(self._parameters):
            given = self._complete(arguments, named)
        results: Any = self.operator(*given)
        return results[0] if self._alone else results[: -self.operator.internal or None]

    def _complete(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in order. Signature.bind takes as long as many a kernel: it only says what is wrong."""
        rest = self._parameters[len(arguments) :]
        given = (*arguments, *(named.get(name, default) for name, default in rest))
        known = len([name for name, _ in rest if name in named])
        if known < len(named) or len(given) > len(self._parameters) or any(x is inspect.Parameter.empty for x in given):
            self._signature.bind(*arguments, **named)
        return given


def declared(outputs: int | None = 1, **options: Any) -> Callable[[Callable[P, R]], Function[P, R]]:
    """A function that returns empty tensors of its results' shapes and types, the internal ones last, as an operator.

    The arguments are those of `Operator`; the function's signature and docstring are what people see.
    """

    def declare(function: Callable[P, R]) -> Function[P, R]:
        results: Any = function
        if outputs == 1:
            results = functools.wraps(function)(lambda *arguments: (function(*arguments),))  # type: ignore[call-arg]
        return Function(function, Operator(function.__module__, results, outputs, **options))

    return declare


def wide_dtype(x: Tensor) -> torch.dtype:
    """Of exponentials, logarithms and sums of x: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this type, unless it has more digits."""
    return x.to(torch.promote_types(x.dtype, dtype))


def handed_dtype(x: Tensor) -> torch.dtype:
    """Of what is handed to an operator per token: as it comes, because the operator computes in `wide_dtype`; on a CPU,
    where half precision is not faster, in that."""
    return wide_dtype(x) if x.device.type == "cpu" else x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Exp, log, scans and normalizers run in the type they are given."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def filled(grads: tuple[Tensor | None, ...], results: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the results, contiguous, zero for those that nobody used."""
    return [torch.zeros_like(r) if g is None else g.contiguous() for g, r in zip(grads, results, strict=False)]


def _gradients(
    operator: Operator,
    backend: Any,
    grads: tuple[Tensor | None, ...],
    arguments: tuple[Any, ...],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Of each tensor argument, by the backend's own backward or by running its forward again with gradients."""
    if all(g is None for g in grads):
        return (None,) * len(operator.tensors)
    backward = getattr(backend, "backward", None)
    if backward is not None:
        if getattr(backend, "FILLED", False):
            grads = tuple(filled(grads[: len(grads) - operator.internal], results))
        return backward(grads, arguments, results, needed)
    with torch.enable_grad():
        again, inputs = list(arguments), []
        for i in operator.tensors:
            if needed[i]:
                again[i] = arguments[i].detach().requires_grad_()
                inputs.append(again[i])
        outputs = backend.forward(*again)
        used = [(y, g) for y, g in zip(outputs, grads, strict=False) if g is not None and y.requires_grad]
        found: Iterator[Tensor | None] = iter(())
        if used:
            reached, by = zip(*used, strict=True)
            found = iter(torch.autograd.grad(reached, inputs, by, allow_unused=True))
    return tuple(next(found, None) if needed[i] else None for i in operator.tensors)


def _kept_results(backend: Any) -> slice:
    """Which results a backend's backward reads."""
    kept = getattr(backend, "READS_RESULTS", True) if hasattr(backend, "backward") else False
    return kept if isinstance(kept, slice) else slice(None) if kept else slice(0)


class _Remade(NamedTuple):
    """A backend that computed arguments of another call: with what (None for tensors), where these are among all that
    are kept for it, and which of its results are which tensor arguments of the other."""

    backend: Any
    others: list[Any]
    tensors: dict[int, int]
    places: dict[int, int]


def _without_remade(kept: list[Tensor | None]) -> tuple[list[Tensor | None], list[_Remade], list[Tensor]]:
    """Tensor arguments without those that are remade, how these are, and the tensors of which."""
    found: dict[int, _Remade] = {}
    sources: list[Tensor] = []
    for place, x in enumerate(kept):
        made = getattr(x, "remade", None)
        if made is None:
            continue
        backend, arguments, which, version = made
        if x is None or x._version != version:  # it is no longer what it was made as
            continue
        if id(arguments) not in found:
            at = [i for i, y in enumerate(arguments) if isinstance(y, Tensor)]
            others = [None if i in at else y for i, y in enumerate(arguments)]
            found[id(arguments)] = _Remade(backend, others, {i: len(sources) + n for n, i in enumerate(at)}, {})
            sources += [arguments[i].detach() for i in at]
        found[id(arguments)].places[which] = place
        kept = [*kept[:place], None, *kept[place + 1 :]]
    return kept, list(found.values()), sources


def _made_again(remade: list[_Remade], sources: tuple[Tensor, ...]) -> Iterator[tuple[int, Tensor]]:
    for each in remade:
        arguments = list(each.others)
        for i, place in each.tensors.items():
            arguments[i] = sources[place]
        results = each.backend.forward(*arguments)
        yield from ((place, results[which]) for which, place in each.places.items())


def _autograd_function(operator: Operator) -> type[torch.autograd.Function]:
    at = operator.tensors

    class Call(torch.autograd.Function):
        """The operator in eager mode: no dispatch by torch, results may share memory."""

        @staticmethod
        def forward(ctx: Any, backend: Any, *arguments: Any) -> tuple[Tensor, ...]:
            ctx.backend, ctx.count, kept = backend, len(at), _kept_results(backend)
            ctx.others = [None if i in at else x for i, x in enumerate(arguments)]
            read = getattr(backend, "READS_ARGUMENTS", operator.arguments)
            saved = [arguments[i] if operator.arguments[i] in read else None for i in at]
            saved, ctx.remade, sources = _without_remade(saved)
            results = backend.forward(*arguments)
            ctx.save_for_backward(*saved, *results[kept], *sources)
            ctx.sources = len(sources)
            if operator.internal:
                ctx.mark_non_differentiable(*results[-operator.internal :])
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # once: what recomputes them may not be asked twice
            saved, sources = saved[: len(saved) - ctx.sources], saved[len(saved) - ctx.sources :]
            arguments = list(ctx.others)
            for i, x in zip(at, saved, strict=False):
                arguments[i] = x
            for place, result in _made_again(ctx.remade, sources):
                arguments[at[place]] = result
            needed = ctx.needs_input_grad[1:]
            given = operator, ctx.backend, grads, tuple(arguments), saved[ctx.count :], needed
            if _is_autocast():
                with without_autocast(dispatch.device_of(saved)):
                    found = _gradients(*given)
            else:
                found = _gradients(*given)
            results: list[Tensor | None] = [None] * (1 + len(arguments))
            for i, gradient in zip(at, found, strict=True):
                results[1 + i] = gradient if needed[i] else None
            return tuple(results)

    Call.__name__ = Call.__qualname__ = operator.name
    return Call


def _apart(results: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Contiguous results that share no memory with each other or with the arguments, as torch asks of an operator."""
    seen = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor)}
    own = []
    for x in results:
        place = x.untyped_storage().data_ptr()
        if not x.is_contiguous() or (x.numel() and place in seen):
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        own.append(x)
    return own


def _custom_op(operator: Operator, kinds: list[str]) -> Any:
    """The operator as torch.library knows it: opaque to compilers, with fake results and a backward of its own."""
    count, at = len(kinds), operator.tensors
    named = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, operator.arguments, strict=True))
    returns = "Tensor[]" if operator.outputs is None else ", ".join(["Tensor"] * operator.outputs)
    returns = f"({returns})" if "," in returns else returns

    def returned(results: Any) -> Any:
        if operator.outputs is None:
            return list(results)
        return results[0] if operator.outputs == 1 else tuple(results)

    def forward(*arguments: Any) -> Any:
        *given, asked = arguments
        with without_autocast(dispatch.device_of(given)):
            results = dispatch.choose(operator, tuple(given), asked).forward(*given)
        return returned(_apart(results, tuple(given)))

    def fake(*arguments: Any) -> Any:
        *given, asked = arguments
        # On a CPU all backends return the same, and choosing one would make guards of sizes.
        if asked != "triton" and dispatch.device_of(given).type == "cpu":
            return returned(operator.results(*given))
        # As declared, unless a backend keeps other internal results and has `results` of its own.
        return returned(getattr(dispatch.choose(operator, tuple(given), asked), "results", operator.results)(*given))

    def backward_op(grads: Any, *rest: Any) -> list[Tensor]:
        given, results, needed, asked = rest[:count], rest[count], rest[count + 1], rest[count + 2]
        backend = dispatch.choose(operator, tuple(given), asked)
        kept = tuple(results)[_kept_results(backend)]
        # Inside an operator torch records no operations, which a forward pass that is run again needs.
        recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        with without_autocast(dispatch.device_of(given)), recording:
            found = _gradients(operator, backend, tuple(grads), tuple(given), kept, tuple(needed))
        like = next(x for x in given if isinstance(x, Tensor))
        missing = (torch.zeros_like(given[i]) if needed[i] else like.new_empty(0) for i in at)
        own = [zero if g is None else g for g, zero in zip(found, missing, strict=True)]
        return _apart(own, (*given, *results, *grads))

    def backward_fake(grads: Any, *rest: Any) -> list[Tensor]:
        like = next(x for x in rest if isinstance(x, Tensor))
        wanted = (rest[i] if rest[count + 1][i] else None for i in at)
        return [
            like.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in wanted
        ]

    name = f"femixer::{operator.name}"
    whole = torch.library.custom_op(name, forward, mutates_args=(), schema=f"({named}, str backend) -> {returns}")
    whole.register_fake(fake)
    schema = f"(Tensor?[] grads, {named}, Tensor[] results, bool[] needed, str backend) -> Tensor[]"
    back = torch.library.custom_op(f"{name}_backward", backward_op, mutates_args=(), schema=schema)
    back.register_fake(backward_fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = (output,) if operator.outputs == 1 else output
        ctx.others = [None if i in at else x for i, x in enumerate(inputs)]
        ctx.save_for_backward(*(inputs[i] for i in at), *results)
        if operator.internal:
            ctx.mark_non_differentiable(*results[-operator.internal :])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if operator.outputs is None:
            (grads,) = grads
        saved = ctx.saved_tensors
        arguments = list(ctx.others)
        for i, x in zip(at, saved, strict=False):
            arguments[i] = x
        needed = [bool(x) for x in ctx.needs_input_grad[:count]]
        found = back(list(grads), *arguments[:count], list(saved[len(at) :]), needed, arguments[count])
        results: list[Tensor | None] = [None] * (count + 1)
        for i, gradient in zip(at, found, strict=True):
            results[i] = gradient if needed[i] else None
        return tuple(results)

    whole.register_autograd(backward, setup_context=setup)
    return whole
