"""Saved models: found by tools that never import femixer, and with a card that is never taken from its owner."""

import json
from pathlib import Path

import pytest
import small_models
import torch
from small_models import images, word_tokenizer
from started import python
from transformers import AutoModel, AutoModelForImageClassification

from femixer.models import (
    Card,
    FEMForCausalLM,
    FEMForecaster,
    FEMImageProcessor,
    FEMVisionModel,
    ForecastConfig,
    Forecaster,
)
from femixer.models.forecast import DLinear

ELSEWHERE = """
import sys, warnings
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer, pipeline

text, images, series, again = sys.argv[1:]
assert "femixer" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(text, trust_remote_code=True)
model.save_pretrained(again)
pipe = pipeline("text-generation", text, trust_remote_code=True, device="cpu")
told = pipe("w3 w5 w7", max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]
from lm_eval.models.huggingface import HFLM
harness = HFLM(pretrained=text, trust_remote_code=True, device="cpu", batch_size=1)
assert torch.equal(harness.model(torch.tensor([[3, 5, 7]])).logits, model(torch.tensor([[3, 5, 7]])).logits)
from PIL import Image
classes = pipeline("image-classification", images, trust_remote_code=True, device="cpu")(Image.new("L", (8, 8), 99))
torch.manual_seed(0)
forecast = AutoModel.from_pretrained(series, trust_remote_code=True)(torch.randn(1, 12, 2))
print("RESULT", [model(torch.tensor([[3, 5, 7]])).logits.sum().item(), told, classes, forecast.tolist()])
"""


def text() -> FEMForCausalLM:
    return small_models.text(num_hidden_layers=1, prior="gla", pad_token_id=0, eos_token_id=1)


def forecaster() -> FEMForecaster:
    torch.manual_seed(0)
    return FEMForecaster(ForecastConfig(channels=2, lookback=12, horizon=3, num_hidden_layers=1)).eval()


def test_models_are_found_by_a_process_that_never_imports_femixer(tmp_path):
    model, pictures, series = text(), images(), forecaster()
    folders = [tmp_path / name for name in ("text", "images", "series", "again")]
    for each, folder in zip((model, pictures, series), folders, strict=False):
        each.save_pretrained(folder)
    word_tokenizer().save_pretrained(folders[0])
    FEMImageProcessor(image_size=8, num_channels=1, image_mean=(0.5,), image_std=(0.5,)).save_pretrained(folders[1])
    environment = {"HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = python("-c", ELSEWHERE, *folders, timeout=600, **environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert done.returncode == 0 and found, done.stderr[-3000:]
    total, told, classes, forecast = eval(found[0].removeprefix("RESULT"))
    assert total == pytest.approx(model(torch.tensor([[3, 5, 7]])).logits.sum().item(), abs=1e-4)
    expected = model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=4, do_sample=False)[0, 3:]
    assert told.split() == [f"w{i}" for i in expected.tolist() if i != 1]
    assert len(classes) == 3 and sum(each["score"] for each in classes) == pytest.approx(1, abs=1e-4)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.tensor(forecast), series(torch.randn(1, 12, 2)), atol=1e-5, rtol=1e-4)
    # Saved again from there, it is the same folder: no file of ours was copied.
    assert {path.name for path in folders[3].iterdir()} == {
        "README.md",
        "config.json",
        "femixer_models.py",
        "generation_config.json",
        "model.safetensors",
    }
    maps = [json.loads((folder / "config.json").read_text())["auto_map"] for folder in (folders[0], folders[3])]
    assert maps[0] == maps[1]


def test_the_map_to_our_classes_goes_to_the_file_and_not_to_the_configuration(tmp_path):
    model = forecaster()
    model.save_pretrained(tmp_path)
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text())
    assert not hasattr(model.config, "auto_map") and "auto_map" not in model.config.to_dict()


def test_the_auto_class_of_forecasters_finds_their_kind(tmp_path):
    config = ForecastConfig(channels=2, lookback=12, horizon=3, kind="dlinear")
    assert type(AutoModel.from_config(config)) is DLinear
    forecaster().save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, Forecaster) and type(loaded) is FEMForecaster


def test_a_card_says_what_is_known(tmp_path):
    model = text()
    model.save_pretrained(tmp_path)
    first = (tmp_path / "README.md").read_text()
    assert "| prior | gla |" in first and f"| parameters | {model.num_parameters():,} |" in first
    assert "2602.07160" in first and "Lu, Jiecheng and Yang, Shihao" in first and "## Data" not in first
    model.card = Card(data="A book.", command="femixer lm train --data book.txt", metrics={"loss": 1.25})
    model.save_pretrained(tmp_path)  # what we wrote is brought up to date
    second = (tmp_path / "README.md").read_text()
    for line in ("## Data\n\nA book.", "| loss | 1.25 |", "    femixer lm train --data book.txt"):
        assert line in second


@pytest.mark.parametrize("change", [lambda ours: "# Mine\n", lambda ours: ours.replace("# FEM", "# My FEM"), str.upper])
def test_a_card_that_someone_else_wrote_or_changed_stays(change, tmp_path: Path):
    model = text()
    model.save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    card.write_text(change(card.read_text()))
    before = card.read_text()
    model.card = Card(data="A book.")
    model.save_pretrained(tmp_path)
    assert card.read_text() == before


def test_images_are_given_numbers_and_show_their_embeddings(tmp_path):
    pixels, wanted = torch.randn(4, 1, 8, 8), torch.arange(4.0)
    for fields in ({"num_labels": 1}, {"num_labels": 1, "problem_type": "regression"}):
        model = images(**fields)
        outputs = model(pixels, labels=wanted)
        torch.testing.assert_close(outputs.loss, (outputs.logits[:, 0] - wanted).square().mean())
    model = images(problem_type="regression")
    targets = torch.randn(4, 3)
    outputs = model(pixels, labels=targets)
    torch.testing.assert_close(outputs.loss, (outputs.logits - targets).square().mean())
    with pytest.raises(ValueError, match="labels has shape"):
        model(pixels, labels=wanted)
    assert model.get_input_embeddings() is model.model.embedding.projection
    model.save_pretrained(tmp_path)
    assert AutoModelForImageClassification.from_pretrained(tmp_path).config.problem_type == "regression"
    body = FEMVisionModel.from_pretrained(tmp_path)
    assert body.get_input_embeddings() is body.embedding.projection
    new = torch.nn.Conv2d(1, 24, 4, stride=4)
    body.set_input_embeddings(new)
    assert body.embedding.projection is new


def test_a_readme_that_cannot_be_read_is_left_alone_and_stops_no_saving(tmp_path):
    model = text()
    (tmp_path / "README.md").write_bytes("größer".encode("latin-1"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == "größer".encode("latin-1")
    assert (tmp_path / "model.safetensors").exists()
