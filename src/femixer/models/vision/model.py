"""The vision models: patches, blocks in encoder mode, a norm, and a classifier on the class token or the mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from femixer.models.block import GELUMLP, FEMBlock
from femixer.models.language import FEMPreTrainedModel
from femixer.models.mixers import build_mixer
from femixer.models.packing import check_arguments
from femixer.models.vision.config import FEMVisionConfig
from femixer.models.vision.depth import StochasticDepth, rising
from femixer.models.vision.embedding import PatchEmbedding
from femixer.rotary import Grid, on_grid


class VisionBlock(FEMBlock):
    """DeiT's block, which knows where its tokens stand in the image."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]
        """x [B, T, dim]; the grid is for mixers with rotary positions."""
        with on_grid(grid):
            return super().forward(x)


class FEMVisionPreTrainedModel(FEMPreTrainedModel):
    """Loading, saving and starting values."""

    config_class = FEMVisionConfig  # type: ignore[assignment]
    main_input_name = "pixel_values"
    input_modalities = "image"
    _no_split_modules = ["VisionBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": VisionBlock}  # noqa: RUF012
    _is_stateful = False

    def get_input_embeddings(self) -> nn.Module:
        """The projection of the patches."""
        return self._patches().projection

    def set_input_embeddings(self, value: nn.Module) -> None:
        self._patches().projection = value

    def _patches(self) -> Any:
        return self.get_submodule("embedding" if self.is_body else "model.embedding")


class FEMVisionModel(FEMVisionPreTrainedModel):
    """pixel_values [B, C, H, W] -> hidden states [B, T, hidden_size] and the image's own [B, hidden_size]."""

    is_body = True

    def __init__(self, config: FEMVisionConfig) -> None:
        super().__init__(config)
        dim, eps, width, stack = config.hidden_size, config.layer_norm_eps, config.intermediate_size, config.stack()
        assert width is not None  # the configuration fills it in
        self.embedding = PatchEmbedding(config)
        self.layers = nn.ModuleList(
            VisionBlock(
                dim,
                build_mixer(stack, layer),
                width,
                eps,
                layer,
                norm=nn.LayerNorm,
                mlp=GELUMLP,
                drop=nn.Sequential(nn.Dropout(config.dropout), StochasticDepth(skipped)),
            )
            for layer, skipped in enumerate(rising(config.drop_path, config.num_hidden_layers))
        )
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """pixel_values [B, num_channels, H, W] of any height and width that patch_size divides."""
        check_arguments(kwargs)
        x, grid = self.embedding(pixel_values)
        for layer in self.layers:
            x = layer(x, grid)
        x = self.norm(x)
        pooled = x[:, 0] if self.config.pooling == "token" else x.mean(1)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)


class FEMForImageClassification(FEMVisionPreTrainedModel):
    """FEMVisionModel with logits of the classes and a loss."""

    accepts_loss_kwargs = False  # the loss is a mean over images: Trainer divides it by the steps it accumulates

    def __init__(self, config: FEMVisionConfig) -> None:
        super().__init__(config)
        classes = config.num_labels
        assert classes is not None  # transformers fills it in
        self.model = FEMVisionModel(config)
        self.classifier = nn.Linear(config.hidden_size, classes)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """labels: a class per image [B], or targets [B, num_labels] that sum to one. loss: cross entropy; with
        config.problem_type="multi_label_classification" each target is a class of its own, yes or no; with "regression"
        (and for a single label) targets are any numbers [B, num_labels], or [B] of a single label, and the loss is
        their mean squared error."""
        outputs = self.model(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss: Any = None
        if labels is not None:
            loss = self._loss(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type or ("regression" if self.config.num_labels == 1 else None)
        if problem == "regression":
            labels = labels.float()[:, None] if labels.dim() == 1 and logits.shape[1] == 1 else labels.float()
            return F.mse_loss(logits.float(), self.targets(labels, logits))
        if problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), self.targets(labels.float(), logits))
        return F.cross_entropy(logits.float(), self.targets(labels, logits))

    def targets(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The labels as cross_entropy takes them, if they fit the logits [B, num_labels]."""
        if labels.is_floating_point():
            if labels.shape != logits.shape:
                raise ValueError(f"labels has shape {tuple(labels.shape)}; allowed as targets is {tuple(logits.shape)}")
            return labels.to(torch.float32)
        if labels.shape != logits.shape[:1]:
            raise ValueError(f"labels has shape {tuple(labels.shape)}; allowed is one class per image, [{len(logits)}]")
        labels, classes = labels.long(), logits.shape[1]
        if not torch.compiler.is_compiling():
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise ValueError(f"labels has {int(wrong[0])}; allowed is 0 to num_labels - 1 = {classes - 1}")
        return labels
