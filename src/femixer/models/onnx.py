"""Models as ONNX files, for runtimes without torch: the plain form, which is torch's operations, by torch.onnx."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from femixer.kernels.dispatch import use_backend
from femixer.models.forecast import Forecaster
from femixer.models.vision import FEMForImageClassification
from femixer.optional import require

# ONNX has no such operation; what stands for it there underflows, and then gives NaN.
UNSTABLE = torch.ops.aten.logcumsumexp.default


class _Output(nn.Module):
    """The one tensor that a model is asked for: logits, or a forecast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        keeps_states = not isinstance(self.model, Forecaster | FEMForImageClassification)
        found = self.model(x, **({"use_cache": False} if keeps_states else {}))
        return found if isinstance(self.model, Forecaster) else found.logits


def to_onnx(model: Any, path: Any, length: int | None = None) -> None:
    """Write a model with a head, or a forecaster, to `path`: input_ids [B, T], pixel_values [B, C, H, W] or history
    [B, lookback, C] -> logits or forecast, for any B.

    length: T of the texts, None for any. Layers with softmax attention can be written for any length, those with the
    priors linear and gla for one length of up to 64 tokens, a single chunk: carrying sums from chunk to chunk needs
    operations that ONNX does not have. The other priors need these operations at any length and are refused.
    """
    require("onnxscript", "onnx")
    config, any_size = model.config, torch.export.Dim.DYNAMIC
    shapes: dict[int, Any] = {0: any_size}
    if isinstance(model, Forecaster):
        name, example = "history", torch.randn(3, config.lookback, config.channels)
    elif isinstance(model, FEMForImageClassification):
        name, example = "pixel_values", torch.randn(3, config.num_channels, config.image_size, config.image_size)
    else:
        name, example = "input_ids", torch.zeros(3, 11 if length is None else length, dtype=torch.long)
        if length is None:
            shapes[1] = any_size
            if {*_mixers(config)} != {"softmax"}:
                raise ValueError(f"{_refusal(model)} of any length; give length= for a fixed one")
    if example.is_floating_point():
        example = example.to(model.dtype)
    with torch.no_grad(), use_backend("plain"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter about itself
        given: dict[str, Any] = {"input_names": [name], "output_names": ["output"], "verbose": False}
        training = model.training
        try:
            program = torch.onnx.export(
                _Output(model).eval(), (example.to(model.device),), dynamo=True, dynamic_shapes=(shapes,), **given
            )
        except Exception as error:
            without = re.search(r"translating node .*?target=torch\.ops\.([\w.]+)", str(error))
            reason = f": it has no {without[1]}" if without else ""
            raise ValueError(f"{_refusal(model)}{reason}") from error
        finally:
            model.train(training)
    assert program is not None and program.exported_program is not None
    if any(node.target is UNSTABLE for node in program.exported_program.graph.nodes):
        raise ValueError(f"{_refusal(model)}: it has no exact logcumsumexp")
    program.save(str(path))


def _refusal(model: Any) -> str:
    return f"a {type(model).__name__} with {', '.join(dict.fromkeys(_mixers(model.config)))} cannot be written as ONNX"


def _mixers(config: Any) -> list[str]:
    """What the layers read with."""
    stack = config.stack() if hasattr(config, "stack") else config
    if not hasattr(stack, "at"):
        return [str(getattr(config, "kind", config.model_type))]
    layers = range(stack.num_hidden_layers)
    return [stack.at("prior" if stack.at("mixer", i) == "fem" else "mixer", i) for i in layers]
