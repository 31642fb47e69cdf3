"""Models in the form of transformers: configure, save, load and generate with the tools that everybody uses.

Importing this package registers them with transformers' Auto classes.
"""

from importlib import import_module

from femixer.optional import require

require("transformers", "lm")

from femixer.models.cache import FEMCache  # noqa: E402
from femixer.models.config import FEMConfig  # noqa: E402
from femixer.models.files import CLASSES, Card  # noqa: E402
from femixer.models.forecast import FEMForecaster, ForecastConfig, Forecaster  # noqa: E402
from femixer.models.images import FEMImageProcessor, PatchMaps, patch_maps  # noqa: E402
from femixer.models.language import (  # noqa: E402  # noqa: E402
    FEMForCausalLM,
    FEMForMaskedLM,
    FEMForSequenceClassification,
    FEMForTokenClassification,
    FEMModel,
)
from femixer.models.named import PRESETS, VISION_PRESETS, preset  # noqa: E402
from femixer.models.vision import FEMForImageClassification, FEMVisionConfig, FEMVisionModel  # noqa: E402

# Asked for again: transformers has put another module in its place since.
transformers = import_module("transformers")
for _names in CLASSES.values():
    _config = globals()[_names["AutoConfig"]]
    for _auto, _name in _names.items():
        _kind, _register = globals()[_name], getattr(transformers, _auto).register
        if _auto == "AutoConfig":
            _register(_config.model_type, _config, exist_ok=True)
        elif _auto == "AutoImageProcessor":
            _register(_config, slow_image_processor_class=_kind, exist_ok=True)
        else:
            _register(_config, _kind, exist_ok=True)
# `transformers serve` asks no Auto class for its model, but the package for the architecture's name (docs/lm.md).
transformers.FEMForCausalLM = FEMForCausalLM  # type: ignore[attr-defined]

__all__ = [
    "PRESETS",
    "VISION_PRESETS",
    "Card",
    "FEMCache",
    "FEMConfig",
    "FEMForCausalLM",
    "FEMForImageClassification",
    "FEMForMaskedLM",
    "FEMForSequenceClassification",
    "FEMForTokenClassification",
    "FEMForecaster",
    "FEMImageProcessor",
    "FEMModel",
    "FEMVisionConfig",
    "FEMVisionModel",
    "ForecastConfig",
    "Forecaster",
    "PatchMaps",
    "patch_maps",
    "preset",
]
