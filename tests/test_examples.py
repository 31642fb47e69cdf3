"""The notebooks in examples/ run from top to bottom, and are kept without outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
pytestmark = pytest.mark.delivery


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, "clear the outputs before committing"
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert shown
    if path.stem == "posterior":
        (page,) = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", ())]
        assert page.startswith("<iframe srcdoc=") and "What a mixer with prior softmax reads" in page


def test_there_are_four() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["drop-in", "forecast", "language-model", "posterior"]
