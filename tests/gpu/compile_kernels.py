"""Run by test_compile.py in a process without the interpreter: compiles what was asked and prints what it found."""

import json
import resource
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from femixer import gpu_compile
from femixer.kernels.triton_compile import compile_for, source_of
from femixer.kernels.triton_launch import launch, recorded
from femixer.priors import parse_prior


@triton.jit(do_not_specialize=["free"])
def crowded(X, Y, free, fixed, N: tl.constexpr):
    """Holds more numbers than a thread has registers, because all wait for their sum."""
    at = tl.arange(0, N)
    x = tl.load(X + at[:, None] * fixed + at[None, :] + free)
    tl.store(Y + at[:, None] * N + at[None, :], x * tl.sum(x))


def spilling() -> dict[str, object]:
    x = torch.empty(128, 128, device="meta")
    with recorded() as found:
        launch(crowded, (1,), x, x, 16, 128, N=128, num_warps=1)
        launch(crowded, (1,), x[0, 1:], x, 16, 1, N=128, num_warps=1)
    sources = [source_of(each) for each in found]
    usage = compile_for(sources[0], "sm_80")
    return {
        "problem": usage.problem("sm_80"),
        "types": [dict(each.types) for each in sources],
        "aligned": [each.aligned for each in sources],
        "constants": [dict(each.constants) for each in sources],
    }


def kernels(target: str, layers: list[str]) -> dict[str, object]:
    """Each kernel of some layers, "prior:type", once per type: in the form that comes first."""
    found: dict[tuple[str, str], Any] = {}
    looked: list[str] = []
    for layer in layers:
        prior, _, dtype = layer.rpartition(":")
        chosen = gpu_compile.uses(
            [parse_prior(prior)], [getattr(torch, dtype)], head_widths=(64,), modes=((True, False),)
        )
        for source in gpu_compile.wanted(target, list(chosen), advance=lambda: looked.append("")):
            found.setdefault((source.label, dtype), source)
    results = gpu_compile.compile_all([(source, target) for source in dict.fromkeys(found.values())], workers=1)
    lines = list(gpu_compile.table(results, [target]))
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    labels = sorted({r.source.label for r in results})
    return {
        "labels": labels,
        "lines": lines,
        "count": len(results),
        "looked": len(looked),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(json.dumps(spilling() if what == "spilling" else kernels(what, rest)))
