"""Forecasters by the names of the paper's table: the fields of ForecastConfig that make a model that column."""

from __future__ import annotations

from femixer.models.named import NAMED, Fields

MODELS: dict[str, Fields] = {
    **{name: {"kind": "fem", **fields} for name, fields in NAMED.items()},
    "DLinear": {"kind": "dlinear"},
    "NLinear": {"kind": "nlinear"},
    "PatchTST": {"kind": "patchtst"},
    "iTransformer": {"kind": "itransformer"},
    "LastValue": {"kind": "last-value"},
    "SeasonalNaive": {"kind": "seasonal-naive"},
}
NAIVE = ("LastValue", "SeasonalNaive")
"""Those that learn nothing."""
