"""`femixer bench <what> [options]`: one line in `BENCHES` and a module with a function `main(args)` for each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

BENCHES = {
    "layer": ("femixer.bench.layer.command", "FEM layers against one softmax attention layer with as many parameters"),
    "scaling": ("femixer.bench.scaling.command", "time per token and memory against the length, and decoding far out"),
}


def main(args: Sequence[str]) -> int | None:
    name, *rest = [*args] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {bench:<10}{text}" for bench, (_, text) in BENCHES.items()]
        print("\n".join(["usage: femixer bench <what> [options]", "", *lines]))
        return 0
    if name not in BENCHES:
        raise ValueError(f"bench={name!r} is unknown; choose one of {', '.join(BENCHES)}")
    return importlib.import_module(BENCHES[name][0]).main(rest)
