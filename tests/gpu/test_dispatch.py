"""When Triton's kernels run: on GPUs new enough, with a triton new enough; elsewhere by name only, or not at all."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import femixer
from femixer.kernels import dispatch
from femixer.kernels.dispatch import BackendError
from femixer.kernels.rms_norm import OPERATOR, numba_cpu, plain, rms_norm, triton_gpu
from femixer.kernels.triton_launch import launch

X, WEIGHT = torch.randn(3, 7), torch.randn(7)
ARGUMENTS = (X, WEIGHT, 1e-6)
META = (X.to("meta"), WEIGHT.to("meta"), 1e-6)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """What was found out about triton and about the GPU is kept for the process."""
    yield
    dispatch._no_triton.cache_clear()
    dispatch.too_old_a_gpu.cache_clear()


class Claimed(torch.Tensor):
    """A tensor that says it is on a GPU. There is none here, so it can be chosen for but not computed with."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(Claimed)


def capability(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
    dispatch.too_old_a_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found)


def test_by_name_it_runs_interpreted_and_without_data() -> None:
    with femixer.use_backend("triton"):
        assert dispatch.choose(OPERATOR, ARGUMENTS) is triton_gpu
        assert dispatch.choose(OPERATOR, META) is triton_gpu
    assert dispatch.choose(OPERATOR, ARGUMENTS) is numba_cpu
    assert dispatch.choose(OPERATOR, META) is plain


@pytest.mark.parametrize("found", [(8, 0), (9, 0), (12, 1)])
def test_on_a_gpu_it_is_the_first_choice(found: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, found)
    assert dispatch.choose(OPERATOR, (on_gpu(X), on_gpu(WEIGHT), 1e-6)) is triton_gpu


def test_a_gpu_that_is_too_old_runs_plain_torch_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, (7, 5))
    arguments = (on_gpu(X), on_gpu(WEIGHT), 1e-6)
    assert dispatch.choose(OPERATOR, arguments) is plain
    with (
        femixer.use_backend("triton"),
        pytest.raises(
            BackendError, match=r"cannot run rms_norm: the GPU's compute capability is 7.5, kernels need 8.0"
        ),
    ):
        dispatch.choose(OPERATOR, arguments)


def test_what_a_kernel_does_not_serve_runs_in_plain_torch_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, (9, 0))
    arguments = (on_gpu(X.double()), on_gpu(WEIGHT.double()), 1e-6)
    assert dispatch.choose(OPERATOR, arguments) is plain
    with (
        femixer.use_backend("triton"),
        pytest.raises(BackendError, match=r"cannot run rms_norm: it takes float32, .* not torch.float64"),
    ):
        rms_norm(X.double(), WEIGHT.double(), 1e-6)


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    dispatch._no_triton.cache_clear()
    monkeypatch.setattr(dispatch, "version", version)
    capability(monkeypatch, (9, 0))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ({}, r"triton is not installed: pip install 'femixer\[gpu\]'"),
        ({"triton": "3.2.0"}, "triton 3.2.0 is too old, it must be 3.3 or later"),
        ({"pytorch-triton-rocm": "3.1.0+gitabc"}, r"triton 3.1.0\+gitabc is too old, it must be 3.3 or later"),
    ],
)
def test_without_a_triton_that_is_new_enough(
    versions: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, versions)
    assert dispatch.choose(OPERATOR, (on_gpu(X), on_gpu(WEIGHT), 1e-6)) is plain
    with pytest.raises(BackendError, match=f"backend='triton' cannot be used: {why}"):
        femixer.use_backend("triton")


@pytest.mark.parametrize("versions", [{"triton": "3.3.0"}, {"pytorch-triton-rocm": "3.3.1"}, {"triton": "4.0.dev1"}])
def test_a_triton_that_is_new_enough_by_any_name(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, versions)
    assert dispatch.unavailable("triton") is None


def test_a_triton_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._no_triton.cache_clear()

    def broken(name: str) -> SimpleNamespace:
        raise ImportError("libcuda is of another age")

    monkeypatch.setattr(dispatch.importlib, "import_module", broken)
    assert dispatch.unavailable("triton") == "triton does not work here (libcuda is of another age)"


ON_A_CPU = """
import torch, femixer
from femixer.kernels.rms_norm import rms_norm
rms_norm(torch.randn(3, 7), torch.randn(7), 1e-6)
"""


def test_on_a_cpu_without_the_interpreter_it_is_an_error() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CPU],
        env={**variables, "FEMIXER_BACKEND": "triton"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        "BackendError: backend='triton' cannot run rms_norm: it runs on GPUs, and on a CPU only interpreted "
        "(TRITON_INTERPRET=1)" in done.stderr
    )


IMPORTED = """
import sys, torch, femixer
femixer.FreeEnergyMixer(24, 3)(torch.randn(2, 5, 24)).sum().backward()
print("triton" in sys.modules)
"""


def test_a_cpu_that_nobody_asked_imports_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_a_grid_that_no_gpu_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axes have at most 65535 programs"):
        launch(triton_gpu._forward, (1, 65536), torch.empty(1, device="meta"))
