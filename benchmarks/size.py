"""How large the operators are: `python benchmarks/size.py`. Lines by folder, and the longest and widest functions."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import femixer

PACKAGE = Path(femixer.__file__).parent


def main() -> None:
    lines: Counter[str] = Counter()
    functions: list[tuple[int, int, str]] = []
    for root in (PACKAGE / "kernels", PACKAGE / "baselines" / "kernels"):
        for path in root.rglob("*.py"):
            if path.name.startswith("triton"):
                continue
            text = path.read_text(encoding="utf-8")
            folder = path.relative_to(PACKAGE).parent
            lines[str(folder)] += len(text.splitlines())
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                    parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                    name = f"{path.relative_to(PACKAGE)}: {node.name}"
                    functions.append((node.end_lineno - node.lineno + 1, parameters, name))
    for folder, count in sorted(lines.items()):
        print(f"{count:>6}  {folder}")
    print(f"{sum(lines.values()):>6}  in all, without Triton")
    for index, what in ((0, "lines"), (1, "parameters")):
        print(f"most {what} (bodies of compiled loops included):")
        for function in sorted(functions, key=lambda f: -f[index])[:5]:
            print(f"{function[index]:>6}  {function[2]}")


if __name__ == "__main__":
    main()
