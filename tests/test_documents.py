"""Worked examples in the documentation run, and its links lead somewhere."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import femixer
from femixer import FreeEnergyMixer
from femixer.cli import main
from femixer.models.files import CITATION
from femixer.priors import PRIORS
from femixer.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/README.md")])


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def python_blocks(name: str) -> list[str]:
    return blocks(name, "python")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example puts into the registry leaves it with the test."""
    monkeypatch.setitem(PRIORS, "fading", PRIORS["aft"])


@pytest.mark.usefixtures("registry")
def test_the_example_of_a_new_prior_runs() -> None:
    namespace: dict[str, Any] = {}
    blocks = python_blocks("docs/add-a-prior.md")
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/add-a-prior.md", "exec"), namespace)
    assert isinstance(namespace["mixer"], FreeEnergyMixer)
    inspection = namespace["mixer"].inspect(namespace["x"])
    assert inspection.prior.shape == (2, 3, 11, 11, namespace["v"].shape[-1])


def test_the_example_of_a_new_task_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, registration = python_blocks("docs/add-a-task.md")
    (tmp_path / "first.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "first", ("", ""))  # what the example puts there leaves it with the test
    exec(compile(registration, "docs/add-a-task.md", "exec"), {})
    (shell,) = blocks("docs/add-a-task.md", "sh")
    for line in shell.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    shown = capsys.readouterr()
    assert "2 jobs, 0 of them finished before" in shown.err
    assert "2 jobs, 1 in part 1/2" in shown.out and "2 records are in first.json" in shown.out
    table = (tmp_path / "results/first-table/table.md").read_text(encoding="utf-8")
    assert table in shown.out and re.search(r"^\| softmax \| \*\*\d+\.\d\*\* \|$", table, re.MULTILINE)
    assert (tmp_path / "results/first-table/table.tex").exists()


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/theory.md"])
def test_examples_run(name: str) -> None:
    for block in python_blocks(name):
        exec(compile(block, name, "exec"), {})


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_examples_of_adapters_quantization_and_fine_tuning_run() -> None:
    namespace: dict[str, Any] = {}
    for block in python_blocks("docs/supported.md"):
        exec(compile(block, "docs/supported.md", "exec"), namespace)
    layers = namespace["config"].num_hidden_layers
    for kind, each in (("lora_A", len(namespace["names"])), ("raw_beta", 1)):  # every name found a module
        assert sum(kind in name for name in namespace["learned"]) == layers * each
    assert namespace["tokens"].shape == (1, 12)
    assert type(namespace["merged"].model.layers[0].mixer.out_proj.weight).__name__ == "Int8Tensor"
    assert namespace["trainer"].state.global_step == 2
    json.loads(blocks("docs/supported.md", "json")[0])


def test_citations_agree() -> None:
    """CITATION.cff, the README's BibTeX and the model cards name the same paper, and CITATION.cff is our version."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0" and cff["version"] == femixer.__version__
    assert {"message", "title", "authors"} <= {*cff}
    paper = cff["preferred-citation"]
    (readme,) = blocks("README.md", "bibtex")
    for bibtex in (readme, CITATION):
        assert f"title = {{{paper['title']}}}" in bibtex and f"year = {{{paper['year']}}}" in bibtex
        names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
        assert f"author = {{{names}}}" in bibtex
        assert paper["url"].removeprefix("https://arxiv.org/abs/") in bibtex


OURS = [f"/{path.relative_to(ROOT)}" for name in ("src", "tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
# Of worked examples, of other projects, and those that a command writes.
OTHERS = re.compile(r"softcap|tasks/first/|^mad/model/auto_encoder|^layers/fem|^femixer_models|^train")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(path: Path) -> None:
    names = {*re.findall(r"(?<![\w/.*-])((?:[\w-]+/)*\w+\.py)\b", path.read_text(encoding="utf-8"))}
    assert not [name for name in names if not OTHERS.search(name) and not any(x.endswith(f"/{name}") for x in OURS)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    assert not [target for target in targets if not (path.parent / target).exists()]
