"""Documentation that installed packages bring, as one text: `python benchmarks/package_text.py OUT [packages]`.

The docstrings of all modules, classes and functions, by default of torch, pandas, numpy, matplotlib, networkx, sympy
and transformers. A docstring that occurs twice is taken once, those below 200 characters are left out, and their order
is drawn with a fixed seed, so that the last part of the text, which is held out, is of all packages. Prints the
packages' versions and the SHA-256 of the text.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

PACKAGES = ("torch", "pandas", "numpy", "matplotlib", "networkx", "sympy", "transformers")
LEAST, SEED = 200, 0


def docstrings(package: str) -> Iterator[str]:
    """Of the package's sources; what cannot be parsed (templates, other Pythons) has none."""
    spec = util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"package={package!r} is not allowed; choose the name of an installed package")
    (folder, *_) = spec.submodule_search_locations
    for path in sorted(Path(folder).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text and len(cleaned := inspect.cleandoc(text)) >= LEAST:
                    yield cleaned


def main(out: str, *packages: str) -> None:
    if not Path(out).resolve().parent.is_dir():
        raise SystemExit(f"OUT={out!r} is not allowed; choose a file in a folder that is there")
    texts: dict[str, None] = {}
    for package in packages or PACKAGES:
        before = len(texts)
        texts |= dict.fromkeys(docstrings(package))
        (owner, *_) = metadata.packages_distributions()[package]
        print(f"{package} {metadata.version(owner)}: {len(texts) - before:,} docstrings")
    ordered = list(texts)
    random.Random(SEED).shuffle(ordered)
    data = ("\n\n".join(ordered) + "\n").encode()
    Path(out).write_bytes(data)
    print(f"{len(data):,} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
