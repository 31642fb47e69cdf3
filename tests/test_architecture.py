"""Rules of the house that a reader relies on, checked on the source: sizes, one chooser, no import upwards."""

import ast
import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import femixer
from femixer.kernels import numba_kernel
from femixer.tasks.runner import Task

PACKAGE = Path(femixer.__file__).parent
KERNELS = PACKAGE / "kernels"
TOP = Path(__file__).parents[1]
# Operators, and the frame they stand in.
OPERATORS = sorted([*KERNELS.rglob("*.py"), *(PACKAGE / "baselines" / "kernels").rglob("*.py")])
# Those with an operator's page.
FOLDERS = [path.parent for path in OPERATORS if "\nOPERATOR = " in path.read_text(encoding="utf-8")]
# What people read to learn the method.
METHOD = sorted(
    [
        *(PACKAGE / f"{name}.py" for name in ("mixer", "projection", "conditioner", "gates", "rotary", "layer")),
        *(PACKAGE / "priors").rglob("*.py"),
        *(PACKAGE / "models").rglob("*.py"),
    ]
)
# Everything else: tasks, models, training, reports.
ROOMS = sorted(path for path in PACKAGE.rglob("*.py") if path not in OPERATORS)
FILES, ROOM_FILES, FILE_LINES, REPEATED = 238, 143, 480, 12
# Of operators without Triton; the aim is 7,000 lines, and until then they may only become shorter.
LINES, OPERATOR_FILES, FUNCTION_LINES, PARAMETERS = 11_161, 61, 80, 12
# Files that a training step passes through, and how often it goes from one to another; the aim for gla is 14 and 45.
WAYS = {"gla": (18, 68), "softmax": (24, 93), "mamba": (18, 70)}

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
    assert len(lines) <= OPERATOR_FILES
    assert not {path: count for path, count in lines.items() if count > FILE_LINES}


@pytest.mark.parametrize("prior", WAYS)
def test_the_way_of_a_step_does_not_get_longer(prior: str) -> None:
    pytest.importorskip("numba")
    step = runpy.run_path(str(TOP / "benchmarks" / "path.py"))["ways"](prior)["training"]
    files, switches = WAYS[prior]
    assert len(set(step)) <= files
    assert len(step) - 1 <= switches


def test_there_are_few_files() -> None:
    """A new one is a new subject: what has one caller stands beside it."""
    assert len(ROOMS) <= ROOM_FILES
    assert len([*PACKAGE.rglob("*.py")]) <= FILES


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_file_is_read_in_one_go() -> None:
    assert not [path for path in ROOMS if length(path) > FILE_LINES]


def test_nothing_is_written_twice() -> None:
    """No run of lines stands in two places; imports, blank lines and lists of arguments do not count."""
    seen: dict[tuple[str, ...], str] = {}
    repeated = set()
    for path in ROOMS:
        code = ast.parse(path.read_text(encoding="utf-8"))
        skipped = {
            line
            for node in ast.walk(code)
            for part in ([node] if isinstance(node, ast.Import | ast.ImportFrom) else [*signature(node)])
            for line in range(part.lineno, part.end_lineno + 1)
        }
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        kept = [(number, line.strip()) for number, line in lines if line.strip() and number not in skipped]
        for at in range(len(kept) - REPEATED):
            run = tuple(line for _, line in kept[at : at + REPEATED + 1])
            place = f"{path.relative_to(PACKAGE)}:{kept[at][0]}"
            if seen.setdefault(run, place) != place:
                repeated.add(f"{seen[run]} and {place}")
    assert not repeated


def signature(node: ast.AST) -> Iterator[ast.AST]:
    """The arguments of a function, one by one."""
    if isinstance(node, ast.FunctionDef):
        yield from (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)


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
    """numba's own cache does not see that an inlined function has changed: decorators of numba_kernel only."""
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


@pytest.mark.parametrize("folder", FOLDERS, **each)
def test_an_operator_has_its_files(folder: Path) -> None:
    """Its page has the declaration, the definition, examples, and the plain form unless that has a file of its own."""
    page = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    names = {node.name for node in page.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(target) for node in page.body if isinstance(node, ast.Assign) for target in node.targets}
    assert names >= {"OPERATOR", "definition", "examples"}
    assert ("forward" in names) != (folder / "plain.py").is_file()


@pytest.mark.parametrize("path", [path for path in OPERATORS if path.name.startswith("numba_")], **each)
def test_compiled_code_takes_constants_from_files_that_the_stamp_covers(path: Path) -> None:
    """Names that compiled functions read: imported from such a file, or made in this one of nothing else."""
    covered = {str(found) for pattern in numba_kernel._SOURCES for found in PACKAGE.glob(pattern)}
    code = ast.parse(path.read_text(encoding="utf-8"))
    uncovered: set[str] = set()

    def names(node: ast.AST) -> set[str]:
        return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}

    for node in code.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "femixer":
            module = PACKAGE.joinpath(*node.module.split(".")[1:])
            files = {str(module.with_suffix(".py")), str(module / "__init__.py")}
            uncovered |= {name.asname or name.name for name in node.names if not files & covered}
        elif isinstance(node, ast.Assign) and uncovered & names(node.value):
            uncovered |= {name for target in node.targets for name in names(target)}
    for function in functions(path):
        if is_compiled(function):
            inside = names(function) - {argument.arg for argument in function.args.args}
            assert not inside & uncovered, f"{function.name} reads {inside & uncovered}, which is not stamped"


@pytest.mark.parametrize("path", [path for path in OPERATORS if path.name.startswith("numba_")], **each)
def test_kernels_write_to_contiguous_tensors(path: Path) -> None:
    """A kernel copies what is not contiguous, and results like a transposed tensor would be lost with the copy."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    likes = [ast.unparse(call) for call in calls if re.search(r"^torch\.\w+_like$", ast.unparse(call))]
    assert not likes, f"new_empty(*x.shape) instead of {likes}"


def modules_of(package: Path) -> dict[str, Path]:
    """Name of every module -> its file."""
    found = {}
    for path in package.rglob("*.py"):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules_of(PACKAGE)


def top(module: str) -> str:
    """The package or module directly in femixer."""
    return ".".join(module.split(".")[:2])


def dependencies(path: Path) -> set[str]:
    """Modules of femixer that a file imports anywhere, inside functions too, or names for a later import.

    What only a type checker reads is not among them: it is never imported. `from femixer import name` is the module
    that the name comes from.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
            names = [name if name in MODULES else EXPORTED.get(name, node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]]
        found |= {name for name in names if name in MODULES and name != "femixer"}
    return found


EXPORTED: dict[str, str] = {
    f"femixer.{name.name}": node.module
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
"""What femixer itself offers -> where it is defined."""


def graph() -> dict[str, set[str]]:
    """package or module of femixer -> those that it depends on."""
    edges: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name == "femixer":
            continue
        edges.setdefault(top(name), set()).update(top(other) for other in dependencies(path))
    return {name: others - {name} for name, others in edges.items()}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Packages that depend on each other in a circle, if there are any."""
    left = dict(edges)
    while free := [name for name, others in left.items() if not others & {*left}]:
        for name in free:
            del left[name]
    while used := [name for name in left if not any(name in others for others in left.values())]:
        for name in used:
            del left[name]
    return sorted(left)


def test_packages_do_not_depend_on_each_other_in_a_circle() -> None:
    """Also not lazily: whoever reads a package needs only those below it."""
    edges = graph()
    assert {"femixer.reporting", "femixer.training", "femixer.models"} <= edges["femixer.tasks"]
    assert "femixer.mixer" in edges["femixer.bench"]  # which it imports from femixer itself
    assert cycle(edges) == []


def test_tasks_have_the_same_rooms() -> None:
    """Whoever knows one of them knows all; each is one object of the shared runner."""
    for folder in (PACKAGE / "tasks").iterdir():
        if (folder / "__init__.py").is_file():
            assert {"data", "model", "fit", "task", "table"} <= {path.stem for path in folder.iterdir()}, folder
            assert isinstance(importlib.import_module(f"femixer.tasks.{folder.name}").TASK, Task)


def test_a_circle_of_packages_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == ["a", "b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_files_of_tests_are_short() -> None:
    assert not [path for path in (TOP / "tests").rglob("*.py") if length(path) > 500]


def test_helpers_of_tests_are_in_one_place() -> None:
    """tests/support has what several files share; those of operators and GPUs have their own beside them."""
    others = {path.name for path in (TOP / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert others == {"conftest.py"}


SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (TOP / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_what_is_there(path: Path) -> None:
    """No test runs the long ones, so nothing else would tell that a module they need was moved."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "femixer":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                known = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert known, f"{path.name} imports {name.name} from {node.module}"
