"""Making the Auto classes of transformers know our models."""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)

from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM, FEMModel
from femixer.models.vision import FEMForImageClassification, FEMImageProcessor, FEMVisionConfig, FEMVisionModel


def register() -> None:
    AutoConfig.register(FEMConfig.model_type, FEMConfig, exist_ok=True)
    AutoModel.register(FEMConfig, FEMModel, exist_ok=True)
    AutoModelForCausalLM.register(FEMConfig, FEMForCausalLM, exist_ok=True)
    AutoConfig.register(FEMVisionConfig.model_type, FEMVisionConfig, exist_ok=True)
    AutoModel.register(FEMVisionConfig, FEMVisionModel, exist_ok=True)
    AutoImageProcessor.register(FEMVisionConfig, slow_image_processor_class=FEMImageProcessor, exist_ok=True)
    AutoModelForImageClassification.register(FEMVisionConfig, FEMForImageClassification, exist_ok=True)
