"""The wheel, in environments that hold nothing but it and what its extras declare.

Each environment is a new venv with the built wheel, installed by pip, and links to the distributions that the wheel's
metadata require for an extra, with all that those require. An import that no extra declares fails here. That pip finds
the same distributions in an index is not tested.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

build = pytest.importorskip("build")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.delivery


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    run([sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir()], folder)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def run(command: Iterable[object], folder: Path, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"FEMIXER_BACKEND": "plain", "HF_HUB_OFFLINE": "1"}  # compiling kernels anew would take minutes
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def metadata(wheel: Path) -> tuple[list[str], HeaderParser]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = HeaderParser().parsestr(archive.read(name).decode())
    return archive.namelist(), message


def required(lines: Iterable[str], extras: set[str], found: dict[str, Distribution]) -> None:
    """Add to `found` what the requirements of a distribution with these extras need, and what that needs."""
    for line in lines:
        need = requirements.Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        key = f"{need.name.lower()}[{','.join(sorted(need.extras))}]"
        if key in found:
            continue
        try:
            found[key] = distribution(need.name)
        except PackageNotFoundError:
            continue  # optional for us all the same, or the import below fails
        required(found[key].requires or (), {"", *need.extras}, found)


def environment(folder: Path, wheel: Path, extras: set[str]) -> Path:
    """A new environment with the wheel and the distributions of these extras. Returns its folder of programs."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    found: dict[str, Distribution] = {}
    required(metadata(wheel)[1].get_all("Requires-Dist"), {"", *extras}, found)
    for one in found.values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(one.locate_file(top))))
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    run([*pip, "install", "--no-deps", "--no-index", wheel], folder)
    return programs


def test_the_wheel_is_whole_and_says_what_it_is(built: tuple[Path, Path]) -> None:
    names, about = metadata(built[1])
    packaged = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name and ".nb" not in name}
    assert packaged <= set(names) and "femixer/py.typed" in names
    assert not [name for name in names if not name.startswith(("femixer/", "femixer-"))]
    assert {url.partition(", ")[2] for url in about.get_all("Project-URL")} == {
        "https://arxiv.org/abs/2602.07160",
        "https://github.com/LJC-FVNR/SequenceLab",
    }
    assert about["Requires-Python"] == ">=3.11"
    page = about.get_payload()
    assert "from femixer import FreeEnergyMixer" in page and "docs/results.md has all rows" in page
    links = re.findall(r"\]\(([^)]*)\)", page)  # a package index knows no other files
    assert links and all(link.startswith("https://") for link in links)
    with tarfile.open(built[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_wheel.py", "mkdocs.yml", "docs/hooks.py", "Makefile", "CHANGELOG.md"} <= inside
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.ipynb")} <= inside


def test_the_version_has_one_place(built: tuple[Path, Path]) -> None:
    namespace = (ROOT / "src/femixer/__init__.py").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project and "version" in project["dynamic"]
    assert f'__version__ = "{metadata(built[1])[1]["Version"]}"' in namespace


def test_the_lowest_versions_are_those_that_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["fast"], *extras["plot"], *extras["cli"], *extras["lm"]]
    declared = {need.name: need for need in map(requirements.Requirement, lines) if need.name != "femixer"}
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    pinned = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    assert {*pinned} == {*declared}
    for name in {*pinned} - {"torch"}:
        (bound,) = declared[name].specifier
        assert pinned[name].startswith(bound.version), name
        assert bound.contains(pinned[name]), name


MODEL = """
import torch, femixer.models
from transformers import AutoModelForCausalLM
config = femixer.models.FEMConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
model = femixer.models.FEMForCausalLM(config)
model.save_pretrained("model")
again = AutoModelForCausalLM.from_pretrained("model")
x = torch.arange(11)[None]
assert torch.equal(model.eval()(x).logits, again.eval()(x).logits)
"""


def test_the_layer_needs_nothing_else(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "base", built[1], set())
    code = """
import importlib.util, torch, femixer
assert importlib.util.find_spec("transformers") is importlib.util.find_spec("numba") is None
mixer = femixer.FreeEnergyMixer(dim=12, heads=3)
y = mixer(torch.randn(2, 7, 12)); y.sum().backward(); mixer.inspect(torch.randn(1, 5, 12))
print(y.shape, femixer.__file__)
"""
    said = run([programs / "python", "-c", code], tmp_path)
    assert "torch.Size([2, 7, 12])" in said and str(tmp_path) in said
    said = run([programs / "femixer", "argmax"], tmp_path, code=2)
    assert said.splitlines() == [
        'error: tyro is needed here and is not installed; install it with: pip install "femixer[cli]"'
    ]


def test_the_commands_need_the_extra_cli(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "cli", built[1], {"cli"})
    tiny = "--channels 8 --length 8 --batch 4 --steps 2 --evaluate-every 1"
    assert "Results are in" in run([programs / "femixer", "argmax", *tiny.split(), "--out", "argmax"], tmp_path)
    said = run([programs / "femixer", "lm", "train", "--out", "lm"], tmp_path, code=2)
    assert said.splitlines()[-1].startswith("error: ") and 'pip install "femixer[lm]"' in said


def test_models_and_tasks_need_their_extras(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "lm", built[1], {"lm"})
    assert "1.3b" in run([programs / "femixer", "lm", "presets"], tmp_path)
    run([programs / "python", "-c", MODEL], tmp_path)


def test_the_other_extras_have_their_import_paths(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "others", built[1], {"forecast", "vision", "onnx", "eval"})
    modules = "tasks.forecast.task tasks.vision.task models.onnx tasks.lm.harness tasks.lm.task surgery"
    code = "; ".join(f"import femixer.{module}" for module in modules.split())
    run([programs / "python", "-c", f"{code}; import pandas, PIL, sklearn, onnx, onnxscript, lm_eval"], tmp_path)
