"""Making the Auto classes of transformers know our models."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM, FEMModel


def register() -> None:
    AutoConfig.register(FEMConfig.model_type, FEMConfig, exist_ok=True)
    AutoModel.register(FEMConfig, FEMModel, exist_ok=True)
    AutoModelForCausalLM.register(FEMConfig, FEMForCausalLM, exist_ok=True)
