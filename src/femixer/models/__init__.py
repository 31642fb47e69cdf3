"""Models in the form of transformers: configure, save, load and generate with the tools that everybody uses.

Importing this package registers them with transformers' Auto classes.
"""

from femixer.optional import require

require("transformers", "lm")

from femixer.models.cache import FEMCache  # noqa: E402
from femixer.models.config import FEMConfig  # noqa: E402
from femixer.models.forecast import FEMForecaster, ForecastConfig, Forecaster  # noqa: E402
from femixer.models.heads import (  # noqa: E402
    FEMForMaskedLM,
    FEMForSequenceClassification,
    FEMForTokenClassification,
)
from femixer.models.language import FEMForCausalLM, FEMModel  # noqa: E402
from femixer.models.presets import PRESETS, VISION_PRESETS, preset  # noqa: E402
from femixer.models.registration import register  # noqa: E402
from femixer.models.saving import Card  # noqa: E402
from femixer.models.vision import (  # noqa: E402
    FEMForImageClassification,
    FEMImageProcessor,
    FEMVisionConfig,
    FEMVisionModel,
    PatchMaps,
    patch_maps,
)

register()

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
