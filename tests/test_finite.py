"""Results that are not finite end a command with exit code 2: the largest of NaN is the first class or token."""

import json
import math
from pathlib import Path

import pytest
import torch
from forecasters import make
from safetensors.torch import load_file, save_file
from small_models import images, of_bytes
from small_models import saved as saved_model
from surgery_models import build

from femixer.cli import main
from femixer.models.files import load_all
from femixer.tasks.vision.data import Preparation
from femixer.tasks.vision.model import Classifier
from femixer.training import Results, RunOptions


def saved(kind: str, folder: Path) -> list[str]:
    """A model whose weights are finite, but so large that what it computes is not; and the command that reads it."""
    torch.manual_seed(0)
    if kind == "vision":
        model = images(num_labels=10, id2label={label: str(label) for label in range(10)})
        Classifier(model, Preparation(8, 1)).save(folder)
        spoil(folder, "classifier")
        return ["vision", "eval", "--model", str(folder), "--data", "digits", "--out", str(folder / "out")]
    if kind == "upgrade":
        build("gpt2").save_pretrained(folder)
        spoil(folder, "ln_f")
        return ["upgrade", str(folder), "--out", str(folder / "out")]
    saved_model(of_bytes(), folder)
    spoil(folder, "lm_head")
    if kind == "eval":
        return ["eval", str(folder), "--tasks", "femixer_example", "--out", str(folder / "out"), "--limit", "2"]
    if kind == "inspect":
        return ["inspect", str(folder), "--text", "some", "--out", str(folder / "out")]
    return ["generate", str(folder), "--prompt", "some", "--max-tokens", "3"]


def spoil(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for key, value in weights.items():
        if name in key:
            weights[key] = torch.full_like(value, 3e38) * torch.randn_like(value).sign()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["generate", "eval", "inspect", "vision", "upgrade"])
def test_a_model_that_computes_nan_gives_no_result(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a model"
    assert main(saved(kind, folder)) == 2
    told = capsys.readouterr()
    assert "NaN or infinite" in told.err.splitlines()[-1] and told.err.splitlines()[-1].startswith("error: ")
    assert "\x00" not in told.out and not (folder / "out" / "table.md").exists()
    assert kind != "upgrade" or not (folder / "out").exists()


def test_a_forecast_that_is_not_finite_is_none() -> None:
    model = make("dlinear")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.inf)
    with pytest.raises(FloatingPointError, match=r"the forecast: .* NaN or infinite"):
        model.predict(torch.randn(50, 3).numpy())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_record_that_is_not_finite_is_written(value: float, tmp_path: Path) -> None:
    from tiny_run import Tiny

    results = Results("tiny", Tiny(), RunOptions(tmp_path / "run"))
    results.append([{"step": 1, "loss": 0.5}])
    with pytest.raises(FloatingPointError, match=r"run' at step 2: scores.1 is -?(nan|inf)"):
        results.append([{"step": 2, "scores": [1.0, value]}])
    assert [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == results.metrics()
    assert len(results.metrics()) == 1


def test_loading_has_one_home() -> None:
    """Whoever loads weights goes through it: a second way would not be as strict."""
    import femixer

    calls = [
        path.name
        for path in Path(femixer.__file__).parent.rglob("*.py")
        if "output_loading_info=True" in path.read_text(encoding="utf-8")
    ]
    assert calls == ["files.py"] and load_all.__module__ == "femixer.models.files"
