"""Models as ONNX files: onnxruntime computes what torch does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import images, stirred, text

from femixer.kernels.recurrence.plain import _in_levels
from femixer.models import FEMForecaster, ForecastConfig
from femixer.models.onnx import to_onnx

runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")


def check(model: Any, path: Path, inputs: list[torch.Tensor]) -> None:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for x in inputs:
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            expected = model(x)
        expected = expected if isinstance(expected, torch.Tensor) else expected.logits
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-5, rtol=1e-4)


def test_a_forecaster(tmp_path):
    model = stirred(FEMForecaster(ForecastConfig(channels=2, lookback=12, horizon=3, num_hidden_layers=1)))
    to_onnx(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx", [torch.randn(5, 12, 2), torch.randn(1, 12, 2)])


def test_a_vision_model(tmp_path):
    model = stirred(images(num_hidden_layers=1))
    to_onnx(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx", [torch.randn(5, 1, 8, 8), torch.randn(1, 1, 8, 8)])


def test_a_text_model_with_softmax_attention_for_any_length(tmp_path):
    model = stirred(text(prior="softmax", num_hidden_layers=1))
    to_onnx(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx", [torch.randint(0, 31, shape) for shape in ((2, 7), (1, 16), (1, 530))])


def test_a_text_model_with_another_prior_for_a_fixed_length(tmp_path):
    model = stirred(text(prior="gla", num_hidden_layers=1))
    with pytest.raises(ValueError, match="with gla cannot be written as ONNX of any length; give length="):
        to_onnx(model, tmp_path / "model.onnx")
    to_onnx(model, tmp_path / "model.onnx", length=13)
    check(model, tmp_path / "model.onnx", [torch.randint(0, 31, (2, 13))])


@pytest.mark.parametrize(("prior", "missing"), [("mamba", r"aten\.cummax"), ("aft", "exact logcumsumexp")])
def test_what_onnx_cannot_say_is_named(prior, missing, tmp_path):
    with pytest.raises(ValueError, match=f"with {prior} cannot be written as ONNX: it has no {missing}"):
        to_onnx(text(prior=prior, num_hidden_layers=1), tmp_path / "model.onnx", length=5)
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 530])
def test_the_scan_of_any_length_is_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    gates = -5 * torch.rand(2, length, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    rows, h = [], torch.zeros(2, 3, dtype=torch.float64)
    for t in range(length):
        h = gates[:, t].exp() * h + x[:, t]
        rows.append(h)
    torch.testing.assert_close(_in_levels(gates, x, 2), torch.stack(rows, 1), atol=1e-12, rtol=1e-12)
