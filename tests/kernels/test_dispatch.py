"""Which backend runs an operator: asked for by code or by the environment, and what happens where it cannot."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import femixer
from femixer.kernels import dispatch
from femixer.kernels import rms_norm as plain
from femixer.kernels.dispatch import BackendError
from femixer.kernels.rms_norm import OPERATOR, numba_cpu, rms_norm

X, WEIGHT = torch.randn(3, 7), torch.randn(7)
ARGUMENTS = (X, WEIGHT, 1e-6)


def chosen() -> object:
    return dispatch.choose(OPERATOR, ARGUMENTS)


def test_the_fastest_backend_that_serves_is_taken() -> None:
    assert chosen() is numba_cpu
    assert dispatch.choose(OPERATOR, (X.double(), WEIGHT.double(), 1e-6)) is plain
    assert dispatch.choose(OPERATOR, (X.to("meta"), WEIGHT.to("meta"), 1e-6)) is plain


def test_use_backend_holds_inside_and_nests() -> None:
    with femixer.use_backend("plain"):
        assert chosen() is plain
        with femixer.use_backend("numba"):
            assert chosen() is numba_cpu
            with femixer.use_backend("auto"):
                assert dispatch.choose(OPERATOR, (X.double(), WEIGHT.double(), 1e-6)) is plain
        assert chosen() is plain
    assert chosen() is numba_cpu


def test_use_backend_ends_with_an_error_and_can_be_entered_again() -> None:
    context = femixer.use_backend("plain")
    with pytest.raises(KeyError), context:
        raise KeyError
    assert chosen() is numba_cpu
    with context, context:
        assert chosen() is plain
    assert chosen() is numba_cpu


def test_one_context_serves_several_threads_at_once() -> None:
    """Each thread finds what it had before, whatever the order in which they leave."""
    context, entered, both, left = femixer.use_backend("numba"), *(threading.Event() for _ in range(3))

    def first() -> object:
        with femixer.use_backend("plain"):
            with context:
                entered.set()
                both.wait(10)
            left.set()
            return chosen()

    def second() -> object:
        entered.wait(10)
        with context:
            both.set()
            left.wait(10)
        return chosen()

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in (pool.submit(first), pool.submit(second))]
    assert results == [plain, numba_cpu]


def test_a_thread_does_not_see_what_another_asks_for() -> None:
    with femixer.use_backend("plain"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen).result() is numba_cpu
        assert chosen() is plain


def test_gradients_come_from_the_backend_of_the_forward_pass() -> None:
    x = X.clone().requires_grad_()
    with femixer.use_backend("plain"):
        y = rms_norm(x, WEIGHT, 1e-6)
    (inside,) = torch.autograd.grad(y.square().sum(), x)
    with femixer.use_backend("plain"):
        (wanted,) = torch.autograd.grad(rms_norm(x, WEIGHT, 1e-6).square().sum(), x)
    assert torch.equal(inside, wanted)


@pytest.mark.parametrize("name", ["nmba", "", "Plain", None, 3])
def test_an_unknown_backend_is_named_with_those_there_are(name: object) -> None:
    with pytest.raises(ValueError, match=r"backend=.* is unknown; choose one of auto, plain, numba, triton") as error:
        femixer.use_backend(name)  # type: ignore[arg-type]
    assert repr(name) in str(error.value)


def test_a_backend_whose_package_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "CANDIDATES", {})
    monkeypatch.setattr(dispatch, "_numba", "numba is not installed: pip install 'femixer[fast]'")
    with pytest.raises(BackendError, match=r"backend='numba' cannot be used: numba is not installed: pip install"):
        femixer.use_backend("numba")
    assert chosen() is plain


def test_a_backend_that_goes_away_inside_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with femixer.use_backend("numba"):
        monkeypatch.setattr(dispatch, "CANDIDATES", {})
        monkeypatch.setattr(dispatch, "_numba", "this process was forked")
        with pytest.raises(BackendError, match="backend='numba' cannot be used: this process was forked"):
            rms_norm(*ARGUMENTS)


def test_a_float_type_that_a_backend_does_not_take_is_an_error_that_says_so() -> None:
    with (
        femixer.use_backend("numba"),
        pytest.raises(BackendError, match=r"cannot run rms_norm: it takes float32 throughout, not x of torch\.float64"),
    ):
        rms_norm(X.double(), WEIGHT.double(), 1e-6)


def test_a_device_that_is_not_the_backends_is_an_error_that_says_so() -> None:
    with (
        femixer.use_backend("numba"),
        pytest.raises(BackendError, match="backend='numba' cannot run rms_norm: it does not run on meta"),
    ):
        rms_norm(X.to("meta"), WEIGHT.to("meta"), 1e-6)


def test_an_operator_without_a_file_for_a_backend_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATOR.implementations, "numba", None)
    assert dispatch.refusal(OPERATOR, "numba", ARGUMENTS) == (
        "rms_norm has no numba_cpu.py: torch's own operations are as fast"
    )
    with femixer.use_backend("numba"):
        assert chosen() is plain


def python(code: str, backend: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "FEMIXER_BACKEND": backend}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)


CHOSEN = """
import torch, femixer
from femixer.kernels import dispatch
from femixer.kernels.rms_norm import OPERATOR
print(dispatch.choose(OPERATOR, (torch.randn(3, 7), torch.randn(7), 1e-6)).__name__.rpartition(".")[2])
with femixer.use_backend("auto"):
    print(dispatch.choose(OPERATOR, (torch.randn(3, 7), torch.randn(7), 1e-6)).__name__.rpartition(".")[2])
"""


@pytest.mark.parametrize(
    ("name", "outside"), [("plain", "rms_norm"), ("numba", "numba_cpu"), ("auto", "numba_cpu"), ("", "numba_cpu")]
)
def test_the_environment_asks_for_a_backend_and_code_overrides_it(name: str, outside: str) -> None:
    done = python(CHOSEN, name)
    assert done.stdout.split() == [outside, "numba_cpu"], done.stderr


CALL = """
import torch
from femixer.kernels.recurrence import OPERATOR
from femixer.kernels.recurrence import examples
print("imported")
{call}(*next(iter(examples().values())))
"""


@pytest.mark.parametrize("call", ["OPERATOR", "torch.compile(OPERATOR, backend='eager')"])
def test_a_misspelt_name_in_the_environment_is_an_error_where_the_first_operator_runs(call: str) -> None:
    done = python(CALL.format(call=call), "nmba")
    assert done.stdout == "imported\n"
    assert "ValueError: FEMIXER_BACKEND='nmba' is unknown; choose one of auto, plain, numba, triton" in done.stderr


def test_nothing_runs_on_every_backend() -> None:
    mixer = femixer.FreeEnergyMixer(24, 3)
    for backend in ("plain", "numba"):
        with femixer.use_backend(backend):
            assert mixer(torch.empty(0, 5, 24)).shape == (0, 5, 24)
            assert mixer(torch.empty(2, 0, 24)).shape == (2, 0, 24)
