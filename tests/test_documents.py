"""Worked examples in the documentation run, and its links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/README.md")])


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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


def test_examples_of_architecture_run() -> None:
    for block in python_blocks("docs/architecture.md"):
        exec(compile(block, "docs/architecture.md", "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    assert not [target for target in targets if not (path.parent / target).exists()]
