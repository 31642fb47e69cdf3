"""Which backend runs an operator: the only place that chooses, and it can say why.

An operator is a folder of this package with one file per backend. A backend is used where its package is there, the
tensors are on a device of its own, and its `refuse(*arguments)` gives no reason against it. The first that serves is
taken, in the order of DEVICES; `use_backend` and the environment variable FEMIXER_BACKEND ask for one by name, and
then a backend that cannot serve is an error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from femixer.kernels.operator import Operator

# The file of a backend in an operator's folder.
FILES = {"plain": "plain", "numba": "numba_cpu", "triton": "triton_gpu"}
# Backends that are tried on a device, the fastest first; plain torch runs on every other one.
DEVICES = {"cpu": ("numba", "plain"), "cuda": ("triton", "plain")}
# Devices on which a backend runs when it is asked for by name, to look at it: without data, or in Triton's interpreter.
BY_NAME = {"triton": ("meta", "cpu")}
CHOICES = ("auto", *FILES)
VARIABLE = "FEMIXER_BACKEND"


class BackendError(RuntimeError):
    """A backend was asked for by name and cannot serve."""


def check(name: object, source: str) -> None:
    """Raise an error that says why, unless there is a backend of this name and it can be used in this process."""
    if not isinstance(name, str) or name not in CHOICES:
        raise ValueError(f"{source}={name!r} is unknown; choose one of {', '.join(CHOICES)}")
    if (why := unavailable(name)) is not None:
        raise BackendError(f"{source}={name!r} cannot be used: {why}")


class _Asked(threading.local):
    """The backend asked for, per thread; None: nobody asked, so FEMIXER_BACKEND holds. outer: those asked around."""

    def __init__(self) -> None:
        self.name: str | None = None  # set from the start: a compiler's guards look at what is there
        self.outer: list[str | None] = []


ASKED = _Asked()


class use_backend:
    """Inside, every operator runs on this backend: "plain" (torch, any device), "numba" (compiled, CPU), "triton"
    (compiled, GPU) or "auto" (the fastest that serves). A backend that cannot serve raises an error that says why. It
    holds for this thread; FEMIXER_BACKEND holds for all.

        with femixer.use_backend("plain"):
            y = mixer(x)
    """

    def __init__(self, name: str) -> None:
        check(name, "backend")
        self.name = name

    def __enter__(self) -> use_backend:
        ASKED.outer.append(ASKED.name)
        ASKED.name = self.name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ASKED.name = ASKED.outer.pop()


def asked() -> str:
    """The backend asked for by `use_backend`, else by the environment, else "auto"."""
    return ASKED.name or ENVIRONMENT


# Read once; a name that is misspelt is an error where the first operator runs.
ENVIRONMENT = os.environ.get(VARIABLE) or "auto"


# Whether a backend works here: None until it is tried, then the reason against it or "".
_numba: str | None = None


def _no_numba() -> str | None:
    global _numba
    if _numba is None:
        if importlib.util.find_spec("numba") is None:
            _numba = "numba is not installed: pip install 'femixer[fast]'"
        elif torch.compiler.is_compiling():
            return None  # a compiler's trace only writes down that an operator is called
        else:
            # A numba that does not fit its surroundings shows here, not in the middle of a read.
            try:
                importlib.import_module("femixer.kernels.numba_kernel")
                _numba = ""
            except Exception as error:
                _numba = f"numba does not work here ({error})"
                warnings.warn(f"{_numba}; kernels run in plain torch", stacklevel=2)
    return _numba or None


def _after_fork() -> None:
    global _numba
    CANDIDATES.clear()
    _numba = "this process was forked, and OpenMP's threads do not survive that: start it by spawning"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Kernels are written for this version of Triton and later ones, and for GPUs of this generation (A100) and later.
OLDEST_TRITON = (3, 3)
OLDEST_CAPABILITY = (8, 0)
ROCM = ("gfx942", "gfx950")
# What Triton is called in torch's builds for GPUs.
TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows")


@functools.cache
def _no_triton() -> str | None:
    found = triton_version()
    if found is None:
        return "triton is not installed: pip install 'femixer[gpu]'"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST_TRITON:
        return f"triton {found} is too old, it must be {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or later"
    try:
        importlib.import_module("triton.language")
    except Exception as error:
        return f"triton does not work here ({error})"
    return None


def triton_version() -> str | None:
    for package in TRITON_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None


def is_interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors, statement by statement."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _no_triton_on(device: torch.device) -> str | None:
    if device.type == "cpu" and not is_interpreted():
        return "it runs on GPUs, and on a CPU only interpreted (TRITON_INTERPRET=1)"
    return too_old_a_gpu(device.index) if device.type == "cuda" else None


@functools.cache
def too_old_a_gpu(index: int | None = None) -> str | None:
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(index or 0).gcnArchName).partition(":")[0]
        return None if name in ROCM else f"kernels are compiled for {' and '.join(ROCM)} of ROCm's GPUs, not for {name}"
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, kernels need {OLDEST_CAPABILITY[0]}.0 or later"
    return None


_UNAVAILABLE: dict[str, Callable[[], str | None]] = {"numba": _no_numba, "triton": _no_triton}


def unavailable(name: str) -> str | None:
    """Why a backend cannot be used in this process at all, or None."""
    return _UNAVAILABLE[name]() if name in _UNAVAILABLE else None


# (backend asked for, device) -> the backends that are tried there, the first one first.
CANDIDATES: dict[tuple[str, torch.device], tuple[str, ...]] = {}


def candidates(name: str, device: torch.device) -> tuple[str, ...]:
    """The backends that an operator tries on a device where `name` is asked for: those that can be used at all."""
    if name != "auto":
        check(name, VARIABLE if ASKED.name is None else "backend")
    tried = DEVICES.get(device.type, ("plain",)) if name == "auto" else (name,)
    found = tuple(each for each in tried if _unserved(each, device) is None)
    if name not in BY_NAME:  # whose interpreter may be switched on and off
        CANDIDATES[name, device] = found
    return found


def _unserved(name: str, device: torch.device) -> str | None:
    """Why a backend cannot be used on a device, or None."""
    if name not in (*DEVICES.get(device.type, ("plain",)), *(each for each in BY_NAME if device.type in BY_NAME[each])):
        return f"it does not run on {device.type}"
    return unavailable(name) or (_no_triton_on(device) if name == "triton" else None)


def refusal(operator: Operator, name: str, arguments: tuple[Any, ...]) -> str | None:
    """Why a backend cannot run an operator on these arguments, or None if it can."""
    why = unavailable(name) or (_no_triton_on(device_of(arguments)) if name == "triton" else None)
    if why is not None:
        return why
    implementation = operator.implementation(name)
    if implementation is None:
        return f"{operator.name} has no {FILES[name]}.py: {operator.left_to_torch}"
    return operator.refusal(implementation, arguments)


def _is_nothing(arguments: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and not x.numel() for x in arguments)


def device_of(arguments: Sequence[Any]) -> torch.device:
    return next((x.device for x in arguments if isinstance(x, torch.Tensor)), torch.device("cpu"))


def choose(operator: Operator, arguments: tuple[Any, ...], name: str | None = None) -> ModuleType:
    """The implementation that runs an operator on these arguments; name: the backend asked for."""
    name, device = asked() if name is None else name, device_of(arguments)
    for each in candidates(name, device):
        if refusal(operator, each, arguments) is None:
            return operator.implementations[each]
    if name == "auto":
        raise BackendError(f"{operator.name}: no backend serves tensors on {device.type}")
    if operator.implementation(name) is None or operator.composed or _is_nothing(arguments):
        # Left to torch, or made of parts that run on the backend asked for, or there is nothing to run.
        return operator.implementations["plain"]
    why = _unserved(name, device) or refusal(operator, name, arguments)
    raise BackendError(f"backend={name!r} cannot run {operator.name}: {why}")
