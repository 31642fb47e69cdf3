"""Rules of the house that a reader relies on, checked on the source: sizes, one chooser, no import upwards."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import femixer
from femixer.kernels import numba_cache

PACKAGE = Path(femixer.__file__).parent
KERNELS = PACKAGE / "kernels"
# Operators, and the frame they stand in.
OPERATORS = sorted([*KERNELS.rglob("*.py"), *(PACKAGE / "baselines" / "kernels").rglob("*.py")])
# What people read to learn the method.
METHOD = sorted(
    [
        *(PACKAGE / f"{name}.py" for name in ("mixer", "projection", "conditioner", "gates", "rotary", "layer")),
        *(PACKAGE / "priors").rglob("*.py"),
        *(PACKAGE / "models").rglob("*.py"),
    ]
)
# The aim is 7,000 lines; until then they may only become fewer.
LINES, FUNCTION_LINES, PARAMETERS = 11_550, 80, 12

each = {"ids": lambda path: str(path.relative_to(PACKAGE))}


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether it is the body of a compiled kernel, with its pointers and strides."""
    return any(
        re.search(r"kernel|job|inline|summing|compiled|jit|overload", ast.unparse(d)) for d in function.decorator_list
    )


def test_operators_do_not_grow() -> None:
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in OPERATORS if "triton" not in path.name
    }
    assert sum(lines.values()) <= LINES


@pytest.mark.parametrize("path", OPERATORS, **each)
def test_functions_of_operators_fit_a_screen(path: Path) -> None:
    for function in functions(path):
        if is_compiled(function):
            continue
        given = function.args
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
        assert count <= PARAMETERS, f"{function.name} has {count} parameters"
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{function.name} has {length} lines"


BACKEND_WORDS = re.compile(r"numba|triton|autograd\.Function|torch\.library|\bbackends?\b|torch\.autograd")


@pytest.mark.parametrize("path", METHOD, **each)
def test_the_method_knows_nothing_of_backends(path: Path) -> None:
    assert not [line for line in path.read_text(encoding="utf-8").splitlines() if BACKEND_WORDS.search(line)]


def imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports anywhere, lazily too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", OPERATORS, **each)
def test_operators_import_nothing_from_above(path: Path) -> None:
    allowed = ["femixer.kernels"]
    if KERNELS not in path.parents:
        allowed.append("femixer.baselines.kernels")
    ours = [name for name in imports(path) if name.split(".")[0] in ("femixer", "")]
    assert not [name for name in ours if not any(f"{name}.".startswith(f"{a}.") for a in allowed) and name != "femixer"]


def test_one_file_chooses_the_backend() -> None:
    choosers = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"find_spec\(.(numba|triton)", text) or re.search(r"^\s*(import|from) triton", text, re.M):
            choosers.append(str(path.relative_to(PACKAGE)))
    assert [name for name in choosers if not Path(name).name.startswith("triton")] == ["kernels/dispatch.py"]


@pytest.mark.parametrize("path", [path for path in OPERATORS if path.name.startswith("numba_")], **each)
def test_compiled_code_is_kept_with_our_stamp(path: Path) -> None:
    """numba's own cache does not see that an inlined function has changed: decorators of numba_math only."""
    assert "cache=True" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", OPERATORS, **each)
def test_compiled_code_is_in_files_that_the_stamp_covers(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if re.search(r"^\s*(import numba|from numba)", text, re.M):
        assert path.name.startswith("numba_")


@pytest.mark.parametrize("path", [*OPERATORS, *(path for path in METHOD if "models" not in path.parts)], **each)
def test_memory_of_tensors_is_not_pinned(path: Path) -> None:
    """Tensor.numpy() makes a storage not resizable for good, and a parameter's storage belongs to whoever shards it."""
    code = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(code) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "numpy"]


@pytest.mark.parametrize("folder", [path.parent for path in OPERATORS if path.name == "definition.py"], **each)
def test_an_operator_has_its_files(folder: Path) -> None:
    for name in ("__init__.py", "definition.py", "plain.py"):
        assert (folder / name).is_file(), name
    assert "OPERATOR" in (folder / "__init__.py").read_text(encoding="utf-8")


LOOPS = [path for path in OPERATORS if path.name.startswith("numba_") and path.name not in ("numba_cpu.py",)]


@pytest.mark.parametrize("path", LOOPS, **each)
def test_compiled_code_takes_constants_from_files_that_the_stamp_covers(path: Path) -> None:
    covered = {str(found) for pattern in numba_cache._SOURCES for found in PACKAGE.glob(pattern)}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "femixer":
            continue
        module = PACKAGE.joinpath(*parts[1:])
        found = [str(p) for p in (module.with_suffix(".py"), module / "__init__.py") if p.is_file()]
        package_only = module == KERNELS or not found
        assert package_only or found[0] in covered, f"{name} is not stamped"
