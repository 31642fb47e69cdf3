"""Compiling recorded launches ahead of time for GPUs that are not here: registers, spills and shared memory.

Triton's wheel brings the assemblers, so this needs no GPU; it does need a process without TRITON_INTERPRET. A launch is
compiled as Triton would when it runs: its tensors by type and alignment, integers by their divisibility unless they are
in `do_not_specialize`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import constexpr
from triton.runtime import JITFunction

from femixer.kernels.triton_launch import Launch

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
# Kilobytes of shared memory of a program: what the smallest of each family has.
MOST_SHARED = {"sm": 99, "gfx": 64}
_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


class Source(NamedTuple):
    """What is compiled: a kernel, types of its operands, its constants, which operands are multiples of 16, options."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def operator(self) -> str:
        return self.module.split(".")[-2]

    @property
    def label(self) -> str:
        return f"{self.operator}.{self.kernel.lstrip('_')}"


class Usage(NamedTuple):
    """Registers of a thread, bytes that it keeps in memory for want of registers, bytes of shared memory."""

    registers: int
    spills: int
    shared: int

    def problem(self, target: str) -> str | None:
        """What is wrong with it on this target, or None."""
        most = 1024 * next(size for family, size in MOST_SHARED.items() if target.startswith(family))
        if self.spills:
            return f"spills {self.spills} bytes"
        return f"{self.shared} bytes of shared memory, {most} are the most" if self.shared > most else None


def source_of(launch: Launch) -> Source:
    """What Triton would compile for a launch."""
    kernel = launch.kernel
    if not hasattr(kernel, "params"):
        raise RuntimeError("kernels are interpreted (TRITON_INTERPRET=1), so they cannot be compiled in this process")
    types, constants, aligned = [], {k: v for k, v in launch.options.items() if k in kernel.arg_names}, []
    for parameter, given in zip(kernel.params, launch.operands, strict=False):
        name = parameter.name
        if isinstance(given, Tensor):
            types.append((name, _TYPES[given.dtype]))
            if given.storage_offset() * given.element_size() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                aligned.append(name)
        elif given is None or (given == 1 and isinstance(given, int) and not parameter.do_not_specialize):
            constants[name] = given
        elif isinstance(given, bool):
            types.append((name, "i1"))
        elif isinstance(given, int):
            types.append((name, "i32" if -(2**31) <= given < 2**31 else "i64"))
            if given % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(name)
        else:
            types.append((name, "fp32"))
    options = {k: v for k, v in launch.options.items() if k not in kernel.arg_names}
    found = (tuple(sorted(each.items())) for each in (constants, options))
    return Source(kernel.fn.__module__, kernel.fn.__name__, tuple(types), next(found), tuple(aligned), next(found))


def sources(launches: Iterable[Launch]) -> list[Source]:
    """Each of them once, in their order."""
    return list(dict.fromkeys(map(source_of, launches)))


def version_of(source: Source) -> str:
    """Of the kernel's code, with all that it calls, and of the compiler; where the code stands does not matter."""
    return repr((triton.__version__, _code(getattr(importlib.import_module(source.module), source.kernel))))


@cache
def _code(kernel: Any) -> tuple[str, ...]:
    """The text of a kernel, of the functions that it calls, and the constants that they use."""
    found = [str(kernel.src)]
    for name in sorted(kernel.fn.__code__.co_names):
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, JITFunction):
            found.extend(_code(value))
        elif isinstance(value, int | float | str | constexpr):
            found.append(f"{name} = {value!r}")
    return tuple(dict.fromkeys(found))


def memory_path() -> Path:
    """Where results may be remembered: beside what Triton keeps of its own."""
    return Path(triton.knobs.cache.dir) / "femixer-usage.jsonl"


def compile_for(source: Source, target: str) -> Usage:
    """Compile a kernel for a target ("sm_90", "gfx942")."""
    kernel = getattr(importlib.import_module(source.module), source.kernel)
    constants = dict(source.constants)
    signature = {**dict(source.types), **dict.fromkeys(constants, "constexpr")}
    ordered = {name: signature[name] for name in kernel.arg_names}
    at = {name: i for i, name in enumerate(kernel.arg_names)}
    attributes = {(at[name],): [["tt.divisibility", 16]] for name in source.aligned}
    unit = ASTSource(
        fn=kernel, signature=ordered, constexprs={(at[k],): v for k, v in constants.items()}, attrs=attributes
    )
    options = {"enable_fp_fusion": True, **dict(source.options)}
    made = triton.compile(unit, target=_gpu(target), options=options)
    usage = _of_amd(made.asm["amdgcn"]) if target.startswith("gfx") else _of_nvidia(made.asm["cubin"])
    return Usage(*usage, made.metadata.shared)


def _gpu(target: str) -> GPUTarget:
    family, _, number = target.partition("_")
    return GPUTarget("cuda", int(number), 32) if family == "sm" else GPUTarget("hip", target, 64)


def _of_amd(assembly: str) -> tuple[int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return 0 if found is None else int(found[1])

    return number("vgpr_count"), number("private_segment_fixed_size")


def _of_nvidia(binary: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()

        def shown(option: str) -> str:
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        usage = shown("-res-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump says nothing of registers: {usage!r}")
        registers, stack = map(int, found.groups())
        # The assembler also reserves stacks that nothing is written to.
        return registers, stack if stack and re.search(r"\bSTL\b", shown("-sass")) else 0
