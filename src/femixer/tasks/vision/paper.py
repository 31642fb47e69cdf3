"""The paper's figures for ImageNet (Table imagenet1k-tiny-small), with the models that it takes from others."""

from __future__ import annotations

TOP1 = {
    "deit-tiny": {"SMAttn": 72.20, "TNN": 72.29, "HGRN": 74.40, "HGRN2": 75.39, "FEM-SM": 76.70, "FEM-GLA": 75.80},
    "deit-small": {"SMAttn": 79.90, "TNN": 79.20, "HGRN": 80.09, "HGRN2": 80.12, "FEM-SM": 80.45, "FEM-GLA": 80.20},
}
"""preset -> model -> top-1 accuracy in percent; SMAttn is DeiT itself."""
CLASSES = 1000


def published(dataset: str, classes: int, preset: str, model: str) -> float | None:
    """The paper's accuracy, if the pictures are ImageNet's."""
    if "imagenet" not in dataset.lower().replace("-", "") or classes != CLASSES:
        return None
    return TOP1.get(preset, {}).get(model)
