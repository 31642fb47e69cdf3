"""A folder whose weights are not those of its model is refused, and what is wrong with it is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import images, text
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from femixer.models import FEMConfig, FEMForCausalLM, FEMModel
from femixer.models.forecast import FORECASTERS, ForecastConfig
from femixer.models.forecast.forecaster import Forecaster

KINDS = ("language", "vision", "forecast")


def save(kind: str, folder: Path) -> type:
    """A small model of this kind, and the class that loads it."""
    if kind == "forecast":
        model = FORECASTERS["dlinear"](ForecastConfig(kind="dlinear", channels=2, lookback=24, horizon=6))
    else:
        model = {"language": text, "vision": images}[kind](num_hidden_layers=1)
    model.save_pretrained(folder)
    return Forecaster if kind == "forecast" else type(model)


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[type, Path]:
    return save(request.param, tmp_path / "model"), tmp_path / "model"


def change(folder: Path, how: Callable[[dict[str, Tensor], str], object]) -> str:
    """Change the weights on disk; how(weights, name of the last weight)."""
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[-1]
    how(weights, name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda weights, name: weights.pop(name), "lack"),
        (lambda weights, name: weights.update({"nobody.knows": torch.zeros(2)}), "nobody.knows"),
        (lambda weights, name: weights.update({name: torch.zeros(2, 2, 2)}), "(2, 2, 2)"),
        (lambda weights, name: weights.update({name: weights[name] * float("nan")}), "not finite"),
        (lambda weights, name: weights.update({name: weights[name] + float("inf")}), "not finite"),
    ],
    ids=["missing", "unexpected", "misshapen", "nan", "inf"],
)
def test_weights_that_are_not_the_models_are_refused_by_name(saved, how, says):
    kind, folder = saved
    name = change(folder, how)
    with pytest.raises(ValueError, match=r"model.*: the weight") as error:
        kind.from_pretrained(folder)
    message = str(error.value)
    assert says in message and (name in message or "nobody.knows" in message) and "\n" not in message


def test_what_is_allowed_to_be_missing_starts_anew(saved):
    kind, folder = saved
    name = change(folder, lambda weights, name: weights.pop(name))
    assert kind.from_pretrained(folder, allow_missing=[name]).num_parameters()
    assert kind.from_pretrained(folder, allow_missing=True).num_parameters()
    with pytest.raises(ValueError, match=name):
        kind.from_pretrained(folder, allow_missing=["other.*"])


def test_a_folder_of_another_kind_is_refused(tmp_path):
    folders = {kind: tmp_path / kind for kind in KINDS}
    classes = {kind: save(kind, folder) for kind, folder in folders.items()}
    for kind, load in classes.items():
        for other, folder in folders.items():
            if other != kind:
                with pytest.raises(ValueError, match="model_type="):
                    load.from_pretrained(folder)


def test_the_body_alone_loads_from_the_whole_model_and_auto_classes_are_as_strict(tmp_path):
    save("language", tmp_path)
    whole = FEMForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 31, (2, 5))
    for load in (FEMModel, AutoModel):
        body = load.from_pretrained(tmp_path)
        assert torch.equal(body(ids).last_hidden_state, whole.model(ids).last_hidden_state)
    change(tmp_path, lambda weights, name: weights.pop(name))
    with pytest.raises(ValueError, match="lack"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "copy.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama'"):
        FEMForCausalLM.from_pretrained(tmp_path)


def test_weights_in_memory_are_loaded_as_strictly_as_those_of_a_folder():
    config = FEMConfig(vocab_size=31, hidden_size=24, num_hidden_layers=1, num_attention_heads=3)
    model = FEMForCausalLM(config)
    again = FEMForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict())
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    held = {name: weight for name, weight in model.state_dict().items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"^state_dict .*lack model\.norm\.weight"):
        FEMForCausalLM.from_pretrained(None, config=config, state_dict=held)
