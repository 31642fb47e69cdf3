"""The frame of operators: one declared in the tests, in every way torch can call it, on both of its backends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import femixer
from femixer.kernels import check
from femixer.kernels.operator import OPERATORS, Operator, _gradients, _without_remade
from femixer.kernels.rotary import rotate
from femixer.kernels.softplus import softplus

from .backends import BACKENDS, examples
from .powers import OPERATOR, _results, definition, numba_cpu

X, WEIGHT, BIAS, *OTHERS = check.page(OPERATOR).examples()["all"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with femixer.use_backend(request.param):
        yield request.param


def inputs() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (X, WEIGHT, BIAS)]


def total(y: Tensor, last: Tensor, *_: Tensor) -> Tensor:
    return y.square().sum() + (3 * last).sin().sum()


def gradients(function: Any, given: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total(*function(*given, *OTHERS)), given)


def expected() -> tuple[Tensor, ...]:
    given = [x.double().requires_grad_() for x in (X, WEIGHT, BIAS)]
    return tuple(x.float() for x in gradients(definition, given))


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@examples(OPERATOR)
def test_results_and_gradients_are_the_definitions(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    assert check.compare(OPERATOR, backend, arguments, dtype).worst < (1e-5 if dtype == torch.float32 else 1e-12)


def test_without_gradients_nothing_is_recorded(backend: str) -> None:
    given = inputs()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            results = OPERATOR(*given, *OTHERS)
        assert not any(y.requires_grad for y in results)
    assert not any(y.requires_grad for y in OPERATOR(X, WEIGHT, BIAS, *OTHERS))


def test_tensors_of_inference_mode_are_taken(backend: str) -> None:
    with torch.inference_mode():
        x = X.clone()
    assert_close(OPERATOR(x, WEIGHT, BIAS, *OTHERS)[0], definition(X, WEIGHT, BIAS, *OTHERS)[0].float())


def test_results_that_only_the_backward_wants_have_no_gradient(backend: str) -> None:
    y, last, inner = OPERATOR(*inputs(), *OTHERS)
    assert y.requires_grad and last.requires_grad and not inner.requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_costs_nothing_and_breaks_nothing(backend: str, used: int) -> None:
    given, wanted = inputs(), inputs()
    found = torch.autograd.grad(OPERATOR(*given, *OTHERS)[used].square().sum(), given)
    assert_close(found, torch.autograd.grad(definition(*wanted, *OTHERS)[used].float().square().sum(), wanted))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_arguments_only(backend: str, wanted: tuple[int, ...]) -> None:
    given = [x.clone().requires_grad_(i in wanted) for i, x in enumerate((X, WEIGHT, BIAS))]
    found = torch.autograd.grad(total(*OPERATOR(*given, *OTHERS)), [given[i] for i in wanted])
    assert_close(found, tuple(expected()[i] for i in wanted))


def test_gradients_that_are_expanded_and_arguments_that_are_not_contiguous(backend: str) -> None:
    given = [X.transpose(0, 1).contiguous().transpose(0, 1), WEIGHT.T.contiguous().T, BIAS[:1].expand(7)]
    given = [x.detach().requires_grad_() for x in given]
    found = torch.autograd.grad(OPERATOR(*given, *OTHERS)[0].sum(), given)
    assert_close(found, torch.autograd.grad(definition(*given, *OTHERS)[0].float().sum(), given))


def test_arguments_changed_in_place_before_the_backward_are_noticed(backend: str) -> None:
    given = inputs()
    result = total(*OPERATOR(*given, *OTHERS))
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def kept(function: Any, given: list[Tensor]) -> list[Tensor]:
    """What autograd keeps between forward and backward, a tensor for each place in memory."""
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        function(*given, *OTHERS)
    return list(found.values())


def test_a_backend_without_a_backward_keeps_its_arguments_only() -> None:
    given = inputs()
    with femixer.use_backend("plain"):
        places = {x.untyped_storage().data_ptr() for x in kept(OPERATOR, given)}
    assert places == {x.untyped_storage().data_ptr() for x in given}


def test_a_backend_that_reads_no_results_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with femixer.use_backend("numba"):
        assert len(kept(OPERATOR, inputs())) == 3 + 2  # two of the three results share their memory
        monkeypatch.setattr(numba_cpu, "READS_RESULTS", False, raising=False)
        assert len(kept(OPERATOR, inputs())) == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(backend: str, reentrant: bool) -> None:
    given = inputs()
    y = checkpoint(lambda *x: OPERATOR(*x, *OTHERS)[:2], *given, use_reentrant=reentrant)
    assert_close(torch.autograd.grad(total(*y), given) if not reentrant else _by_backward(total(*y), given), expected())


def _by_backward(result: Tensor, given: list[Tensor]) -> tuple[Tensor | None, ...]:
    result.backward()
    return tuple(x.grad for x in given)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_whole_it_is_one_operation_with_the_same_results(backend: str, compiler: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: OPERATOR(*x, *OTHERS), fullgraph=True, backend=compiler)
    with torch.no_grad():
        for found, wanted in zip(compiled(*inputs()), OPERATOR(*inputs(), *OTHERS), strict=True):
            assert_close(found, wanted)
    assert_close(gradients(lambda *x: compiled(*x[:3]), inputs()), expected())


def test_compiled_in_another_backend_it_is_compiled_again() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: OPERATOR(*x, *OTHERS)[0], fullgraph=True, backend="eager")
    for name in ("plain", "numba", "plain", "numba"):
        numba_cpu.calls.clear()
        with femixer.use_backend(name):
            compiled(X, WEIGHT, BIAS)
        assert numba_cpu.calls == (["forward"] if name == "numba" else [])


def test_a_compiler_may_leave_the_length_open(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: OPERATOR(*x, *OTHERS), fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 6, 11):
        x = torch.randn(2, length, 3)
        assert_close(compiled(x, WEIGHT, BIAS)[0], OPERATOR(x, WEIGHT, BIAS, *OTHERS)[0])


@pytest.mark.parametrize("name", ["plain", "numba", "auto"])
def test_torch_is_content_with_it_as_a_custom_operator(name: str) -> None:
    for arguments in check.page(OPERATOR).examples().values():
        given = tuple(x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(OPERATOR._operation, (*given, name))


def test_fake_tensors_have_the_shapes_of_results_and_gradients(backend: str) -> None:
    mode = FakeTensorMode()
    given = [mode.from_tensor(x).requires_grad_() for x in (X, WEIGHT, BIAS)]
    with mode:
        results = OPERATOR(*given, *OTHERS)
        found = torch.autograd.grad(total(*results), given)
    assert [y.shape for y in results] == [y.shape for y in definition(X, WEIGHT, BIAS, *OTHERS)]
    assert [g.shape for g in found] == [x.shape for x in given]


def test_on_the_meta_device_its_operations_can_be_counted() -> None:
    given = [x.to("meta").requires_grad_() for x in (X, WEIGHT, BIAS)]
    found = gradients(OPERATOR, given)
    assert all(g.device.type == "meta" and g.shape == x.shape for g, x in zip(found, given, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated")  # by torch, for derivatives forward in time
def test_transforms_of_functions_see_through_it(backend: str) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return total(*OPERATOR(x, weight, bias, *OTHERS))

    assert_close(torch.func.grad(function, (0, 1, 2))(X, WEIGHT, BIAS), expected())
    weights = torch.stack([WEIGHT, 2 * WEIGHT, -WEIGHT])
    found = torch.func.vmap(torch.func.grad(function, 1), (None, 0, None))(X, weights, BIAS)
    assert_close(found[0], expected()[1])
    assert_close(found[1], torch.func.grad(function, 1)(X, 2 * WEIGHT, BIAS))
    tangent = torch.randn_like(BIAS)
    _, along = torch.func.jvp(lambda b: function(X, WEIGHT, b), (BIAS,), (tangent,))
    assert_close(along, (expected()[2] * tangent).sum())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_not_lower_its_precision(backend: str, compiled: bool) -> None:
    torch._dynamo.reset()
    given = inputs()
    function = torch.compile(OPERATOR, fullgraph=True, backend="eager") if compiled else OPERATOR
    with torch.autocast("cpu", torch.bfloat16):
        results = function(*given, *OTHERS)
        # torch's own operations, which a compiler makes of the plain form, are not to be differentiated in here.
        found = None if compiled and backend == "plain" else gradients(function, given)
    assert results[0].dtype == torch.float32
    assert_close(results[0], OPERATOR(*given, *OTHERS)[0])
    assert_close(torch.autograd.grad(total(*results), given), expected())
    if found is not None:
        assert_close(found, expected())


def test_tensor_subclasses_run_as_torchs_own_operations(backend: str) -> None:
    weight = TwoTensor(WEIGHT, 2 * WEIGHT)
    y = OPERATOR(X, weight, BIAS, *OTHERS)[0]
    assert isinstance(y, TwoTensor)
    assert_close(y.a, OPERATOR(X, WEIGHT, BIAS, *OTHERS)[0])
    assert_close(y.b, OPERATOR(X, 2 * WEIGHT, BIAS, *OTHERS)[0])


class Labelled(Tensor):
    """A subclass as Python makes them, with torch's own behaviour."""


def test_a_subclass_of_a_parameter_learns(backend: str) -> None:
    class Special(torch.nn.Parameter):
        pass

    given = [X, Special(WEIGHT.clone()), BIAS.as_subclass(Labelled)]
    total(*OPERATOR(*given, *OTHERS)).backward()
    assert_close(given[1].grad.as_subclass(Tensor), expected()[1])


def test_a_second_derivative_is_an_error_and_not_wrong() -> None:
    given = inputs()
    with femixer.use_backend("numba"):
        first = torch.autograd.grad(total(*OPERATOR(*given, *OTHERS)), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


def test_an_empty_batch_has_empty_results_and_gradients(backend: str) -> None:
    given = [X[:0].clone().requires_grad_(), *inputs()[1:]]
    found = gradients(OPERATOR, given)
    assert found[0].shape == (0, 5, 3)
    assert_close(found[1], torch.zeros_like(WEIGHT))


def test_two_operators_cannot_have_one_name() -> None:
    with pytest.raises(ValueError, match=r"operator='powers' exists already, in .*kernels\.powers"):
        Operator("elsewhere.powers", _results, 3)
    assert OPERATORS["powers"] is OPERATOR


def test_a_declared_function_has_a_signature_defaults_and_names() -> None:
    q, k, angles = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 1, 4), torch.randn(1, 3, 2)
    assert list(inspect.signature(rotate).parameters) == ["q", "k", "cos", "sin", "floor"]
    assert "y_2i = x_2i cos_i" in str(rotate.__doc__)
    wanted = rotate(q, k, angles, angles, None)
    for found in (rotate(q, k, angles, angles), rotate(q, k, sin=angles, cos=angles, floor=None)):
        assert all(map(torch.equal, found, wanted)) and len(found) == 2
    with pytest.raises(TypeError, match="missing a required argument: 'cos'"):
        rotate(q, k)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"x": torch.float16}, "it takes float32 or float64 throughout, not x of torch.float16"),
        (
            {"x": torch.float32, "weight": torch.float64},
            "it takes float32 or float64 throughout, not weight of torch.float64",
        ),
        ({"x": torch.float32, "bias": torch.float32}, "it takes bias of float64, not torch.float32"),
        ({"x": torch.float32, "weight": torch.float32, "bias": torch.float64}, None),
        ({"x": torch.float32, "weight": torch.float64, "bias": torch.float64, "any": ("weight",)}, None),
        ({"x": None}, "x is empty"),
    ],
)
def test_a_backend_takes_one_float_type_throughout(given: dict[str, Any], why: str | None) -> None:
    """States apart, which are float64 always, and what may be of any type."""
    backend = SimpleNamespace(FLOATS=(torch.float32, torch.float64), STATES=("bias",), ANY=given.pop("any", ()))
    tensors = {name: torch.ones(0 if dtype is None else 3, dtype=dtype) for name, dtype in given.items()}
    assert OPERATOR.refusal(backend, (*map(tensors.get, ("x", "weight", "bias")), *OTHERS)) == why


@pytest.mark.parametrize("filled", [False, True])
def test_gradients_that_nobody_used_are_none_or_filled(filled: bool) -> None:
    """Of the results that people see; internal ones have none."""
    given: list[tuple[Tensor | None, ...]] = []
    backend = SimpleNamespace(backward=lambda grads, *_: given.append(grads))
    if filled:
        backend.FILLED = True
    results = OPERATOR(X, WEIGHT, BIAS, *OTHERS)
    arguments = X, WEIGHT, BIAS, *OTHERS
    _gradients(OPERATOR, backend, (torch.ones_like(results[0]), None, None), arguments, results, (True,) * 3)
    (found,) = given
    assert found[0].sum() == results[0].numel()
    if filled:
        assert len(found) == 2
        assert torch.equal(found[1], torch.zeros_like(results[1]))
    else:
        assert found[1:] == (None, None)


def test_a_function_takes_its_arguments_by_place_and_name_and_says_what_is_wrong() -> None:
    x, bias = torch.randn(3, 5), torch.randn(5)
    wanted = softplus(x, bias, 1.0, 0.5)
    assert torch.equal(softplus(x, bias, floor=0.5), wanted)
    assert torch.equal(softplus(floor=0.5, x=x, bias=bias), wanted)
    for arguments, named in (((), {}), ((x,), {"flor": 0.5}), ((x,), {"x": x}), ((x, bias, 1.0, 0.5, 2.0), {})):
        with pytest.raises(TypeError, match=r"missing a required|unexpected keyword|multiple values|too many"):
            softplus(*arguments, **named)


def test_a_result_that_was_changed_since_is_kept_and_not_made_again() -> None:
    y = torch.ones(3)
    y.remade = None, (torch.ones(3),), 0, y._version  # type: ignore[attr-defined]
    kept, remade, sources = _without_remade([y])
    assert kept == [None] and len(remade) == len(sources) == 1
    y.mul_(5)
    kept, remade, _ = _without_remade([y])
    assert kept[0] is y and not remade


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", sorted(each.name for each in check.find_operators("femixer.kernels") if each.gradients)
)
def test_a_plain_pass_forwards_or_backwards_changes_no_argument(name: str, dtype: torch.dtype) -> None:
    """What is worked on in place is not an argument, nor shares its memory, in whatever type that is."""
    operator = OPERATORS[name]
    for arguments in check.page(operator).examples().values():
        given = check.cast(arguments, dtype)
        given = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in given)
        copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
        leaves = [x.requires_grad_() for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        with femixer.use_backend("plain"):
            results = [x for x in operator(*given) if x.requires_grad and x.numel()]
            if results:
                torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)
        for x, copy in zip(given, copies, strict=True):
            assert not isinstance(x, Tensor) or torch.equal(x, copy)
