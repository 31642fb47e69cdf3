"""Published errors of long-horizon forecasting: the paper's table, and what its baselines reported per horizon."""

from __future__ import annotations

COLUMNS = (
    "FEM-SM",
    "FEM-GLA",
    "FEM-Mamba",
    "FEM-AFT",
    "GLA",
    "AFT",
    "iTransformer",
    "PatchTST",
    "DLinear",
)
"""Of the paper's table, from left to right."""
_MEANS = {
    "weather": (0.222, 0.223, 0.218, 0.218, 0.223, 0.221, 0.232, 0.221, 0.233),
    "solar": (0.189, 0.188, 0.193, 0.186, 0.204, 0.198, 0.219, 0.202, 0.216),
    "ETTh1": (0.419, 0.418, 0.421, 0.414, 0.418, 0.421, 0.454, 0.413, 0.422),
    "ETTh2": (0.340, 0.344, 0.340, 0.339, 0.342, 0.342, 0.374, 0.330, 0.426),
    "ETTm1": (0.341, 0.345, 0.346, 0.344, 0.357, 0.351, 0.373, 0.346, 0.347),
    "ETTm2": (0.242, 0.247, 0.246, 0.241, 0.250, 0.245, 0.265, 0.247, 0.252),
}
MEANS = {
    (dataset, model): error for dataset, errors in _MEANS.items() for model, error in zip(COLUMNS, errors, strict=True)
}
"""(data set, model) -> test MSE, the mean over horizons 96, 192, 336 and 720 (Table tab:ts-forecast)."""

PER_HORIZON = {
    ("ETTh1", "PatchTST"): {96: 0.370, 192: 0.413, 336: 0.422, 720: 0.447},
    ("ETTh1", "DLinear"): {96: 0.375, 192: 0.405, 336: 0.439, 720: 0.472},
    ("ETTh1", "iTransformer"): {96: 0.386, 192: 0.441, 336: 0.487, 720: 0.503},
}
"""Test MSE as published, at look-backs of their own: PatchTST/64 at 512 (Nie et al., 2023), DLinear at 336 (Zeng et
al., 2023), iTransformer at 96 (Liu et al., 2024)."""
