"""The configuration of a vision model: a transformer over the patches of an image."""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from femixer.models.config import LARGEST, FEMConfig, check_types, mixer_fields
from femixer.models.mixers import check_encoder, takes_rope
from femixer.options import check
from femixer.priors import prior_class

PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
POOLINGS = ("token", "mean")
POSITIONS = ("learned", "rotary")


@strict
class FEMVisionConfig(PreTrainedConfig):
    """Sizes, mixers and classes of a model.

    mixer, prior, parts, budget, start, readout, mixer_temperature, mixer_options, prior_options: as in FEMConfig, so
    that a row of femixer.models.named fits. pooling: "token" reads a learned class token in front of the patches,
    "mean" has none and takes the mean of the patches. positions: "learned" adds an embedding per patch, interpolated
    for images of another size; "rotary" rotates half of the pairs of a head's query and key channels with the row and
    half with the column.
    num_labels, id2label: as everywhere in transformers.
    """

    model_type = "fem_vision"

    image_size: int = 224  # height and width of the training images; others may be read
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    intermediate_size: int | None = None  # width of the MLP; None: 4 hidden_size
    mixer: str | list[str] = "fem"  # "fem", or a baseline that can be an encoder: "attention"
    prior: str | list[str] = "softmax"
    parts: str = "CLTG"
    budget: str = "attention"
    start: str = "paper"
    readout: str = "free_energy"
    mixer_temperature: str = "learned"
    mixer_options: dict[str, Any] | None = None
    prior_options: dict[str, Any] | None = None
    rope_base: float = 100.0  # of rotary positions; a grid has few rows, a text many tokens
    mixer_bias: bool = True
    mixer_dropout: float = 0.0
    pooling: str = "token"
    positions: str = "learned"
    dropout: float = 0.0  # of the embedded patches and of both branches of a block
    drop_path: float = 0.0  # chance of the last block's branches to be skipped, rising linearly from 0 at the first
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02  # deviation of the starting weights of patches, MLPs and classes

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: see FEMPreTrainedModel."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers after a change: every layer must be possible."""
        check_types(self)
        for name in ("image_size", "patch_size", "num_channels"):
            size = getattr(self, name)
            check(0 < size <= LARGEST, name, size, f"a whole number from 1 to {LARGEST:,}")
        multiple = f"a multiple of patch_size={self.patch_size}"
        check(self.image_size % self.patch_size == 0, "image_size", self.image_size, multiple)
        problem = self.problem_type
        check(problem in (None, *PROBLEMS), "problem_type", problem, f"one of {', '.join(PROBLEMS)}, or None")
        check(self.pooling in POOLINGS, "pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        check(self.positions in POSITIONS, "positions", self.positions, f"one of {', '.join(POSITIONS)}")
        for name in ("dropout", "drop_path", "mixer_dropout"):
            check(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        for name in ("layer_norm_eps", "initializer_range"):
            check(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a number above 0")
        for mixer in [self.mixer] if isinstance(self.mixer, str) else self.mixer:
            check_encoder(mixer)
            if self.positions == "rotary" and not takes_rope(mixer):
                raise ValueError(
                    f"positions='rotary' does not fit mixer={mixer!r}: it rotates nothing; choose 'learned'"
                )
        stack = self.stack()
        if self.positions == "rotary":
            for layer in range(self.num_hidden_layers):
                self._check_rotary(stack.at("mixer", layer), stack.at("prior", layer))

    def _check_rotary(self, mixer: str, prior: str) -> None:
        if mixer == "fem" and not prior_class(prior).queries_and_keys:
            raise ValueError(
                f"positions='rotary' does not fit prior={prior!r}: it has no queries and keys; choose 'learned'"
            )
        if mixer != "fem" or self.budget == "attention":  # a head of queries has hidden_size / heads channels
            four = 4 * self.num_attention_heads
            multiple = f"a multiple of {four}: rotary positions rotate pairs of a head by rows and pairs by columns"
            check(self.hidden_size % four == 0, "hidden_size", self.hidden_size, multiple)

    @property
    def patches(self) -> int:
        """Of a training image, along each side."""
        return self.image_size // self.patch_size

    def stack(self) -> FEMConfig:
        """The layers as a configuration from which their mixers are built."""
        return FEMConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            causal=False,
            rope=self.positions == "rotary",
            rope_base=self.rope_base,
            mixer_bias=self.mixer_bias,
            mixer_dropout=self.mixer_dropout,
            **mixer_fields(self),
        )
