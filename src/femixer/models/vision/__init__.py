"""Vision models: DeiT's architecture with any mixer as encoder."""

from femixer.models.vision.config import FEMVisionConfig
from femixer.models.vision.model import FEMForImageClassification, FEMVisionModel
from femixer.models.vision.pictures import FEMImageProcessor
from femixer.models.vision.reading import PatchMaps, patch_maps

__all__ = [
    "FEMForImageClassification",
    "FEMImageProcessor",
    "FEMVisionConfig",
    "FEMVisionModel",
    "PatchMaps",
    "patch_maps",
]
