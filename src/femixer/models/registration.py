"""Making the Auto classes of transformers know our models."""

import transformers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from femixer.models.config import FEMConfig
from femixer.models.forecast import ForecastConfig, Forecaster
from femixer.models.heads import FEMForMaskedLM, FEMForSequenceClassification, FEMForTokenClassification
from femixer.models.language import FEMForCausalLM, FEMModel
from femixer.models.vision import FEMForImageClassification, FEMImageProcessor, FEMVisionConfig, FEMVisionModel


def register() -> None:
    AutoConfig.register(FEMConfig.model_type, FEMConfig, exist_ok=True)
    AutoModel.register(FEMConfig, FEMModel, exist_ok=True)
    AutoModelForCausalLM.register(FEMConfig, FEMForCausalLM, exist_ok=True)
    AutoModelForMaskedLM.register(FEMConfig, FEMForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(FEMConfig, FEMForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(FEMConfig, FEMForTokenClassification, exist_ok=True)
    AutoConfig.register(FEMVisionConfig.model_type, FEMVisionConfig, exist_ok=True)
    AutoModel.register(FEMVisionConfig, FEMVisionModel, exist_ok=True)
    AutoImageProcessor.register(FEMVisionConfig, slow_image_processor_class=FEMImageProcessor, exist_ok=True)
    AutoModelForImageClassification.register(FEMVisionConfig, FEMForImageClassification, exist_ok=True)
    AutoConfig.register(ForecastConfig.model_type, ForecastConfig, exist_ok=True)
    AutoModel.register(ForecastConfig, Forecaster, exist_ok=True)
    # `transformers serve` asks no Auto class for its model, but the package for the architecture's name (docs/lm.md).
    transformers.FEMForCausalLM = FEMForCausalLM  # type: ignore[attr-defined]
