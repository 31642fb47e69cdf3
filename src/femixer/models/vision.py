"""The vision models and their configuration: patches, encoder blocks, a norm, and a classifier on the class token or
the mean."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from femixer.models.block import GELUMLP, FEMBlock, build_mixer, check_encoder, takes_rope
from femixer.models.config import FEMConfig, Layers, MixerConfig, Size, check_values, one_of
from femixer.models.language import FEMPreTrainedModel, check_arguments
from femixer.options import BelowOne, Positive, check
from femixer.priors import prior_class
from femixer.rotary import Grid, on_grid

PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
POSITIONS = ("learned", "rotary")


@strict
class FEMVisionConfig(MixerConfig):
    """Sizes, mixers and classes of a model.

    The fields of MixerConfig, so that rows of femixer.models.named fit, and those below; the mixer must work as an
    encoder. num_labels, id2label: as everywhere in transformers.

    Attributes:
        image_size: Height and width of the training images; others may be read.
        patch_size: Height and width of a patch.
        num_channels: 1 (grey) or 3.
        hidden_size: Width of the tokens.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Heads of every mixer.
        intermediate_size: Width of the MLP; None: 4 hidden_size.
        rope_base: Base of the frequencies of rotary positions; a grid has few rows, a text many tokens.
        mixer_bias: Whether the mixers' projections have biases.
        mixer_dropout: Dropout of the mixers' reads.
        pooling: "token" classifies a learned class token in front of the patches, "mean" the mean of the patches.
        positions: "learned" adds an embedding per patch, interpolated for images of another size; "rotary" rotates
            half of the pairs of a head's query and key channels with the row and half with the column.
        dropout: Of the embedded patches and of both branches of a block.
        drop_path: Chance of the last block's branches to be skipped, rising linearly from 0 at the first.
        layer_norm_eps: Epsilon of the norms.
        initializer_range: Standard deviation of the initial weights of patches, MLPs and classes.
    """

    model_type = "fem_vision"

    image_size: Size = 224
    patch_size: Size = 16
    num_channels: Size = 3
    hidden_size: Size = 192
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 3
    intermediate_size: Size | None = None
    rope_base: Positive = 100.0
    mixer_bias: bool = True
    mixer_dropout: BelowOne = 0.0
    pooling: Annotated[str, one_of("token", "mean")] = "token"
    positions: Annotated[str, one_of(*POSITIONS)] = "learned"
    dropout: BelowOne = 0.0
    drop_path: BelowOne = 0.0
    layer_norm_eps: Positive = 1e-6
    initializer_range: Positive = 0.02

    def _usual(self) -> dict[str, Any]:
        return {"intermediate_size": 4 * self.hidden_size}

    def validate_architecture(self) -> None:
        """Called by transformers after a change: every layer must be possible."""
        check_values(self)
        multiple = f"a multiple of patch_size={self.patch_size}"
        check(self.image_size % self.patch_size == 0, "image_size", self.image_size, multiple)
        problem = self.problem_type
        check(problem in (None, *PROBLEMS), "problem_type", problem, f"one of {', '.join(PROBLEMS)}, or None")
        for mixer in [self.mixer] if isinstance(self.mixer, str) else self.mixer:
            check_encoder(mixer)
            if self.positions == "rotary" and not takes_rope(mixer):
                raise ValueError(
                    f"positions='rotary' does not fit mixer={mixer!r}: it rotates nothing; choose 'learned'"
                )
        four = 4 * self.num_attention_heads
        multiple = f"a multiple of {four}: rotary positions rotate pairs of a head by rows and pairs by columns"
        for layer in range(self.num_hidden_layers) if self.positions == "rotary" else ():
            fem, prior = self.at("mixer", layer) == "fem", self.at("prior", layer)
            if fem and not prior_class(prior).queries_and_keys:
                told = f"does not fit prior={prior!r}: it has no queries and keys; choose 'learned'"
                raise ValueError(f"positions='rotary' {told}")
            if not fem or (self.budget == "attention" and self.value_dim is None):
                # A head of queries has hidden_size / heads channels.
                check(self.hidden_size % four == 0, "hidden_size", self.hidden_size, multiple)
        self.stack()

    @property
    def patches(self) -> int:
        """Of a training image, along each side."""
        return self.image_size // self.patch_size

    def stack(self) -> FEMConfig:
        own = {name: getattr(self, name) for name in ("rope_base", "mixer_bias", "mixer_dropout")}
        return self._layers(causal=False, rope=self.positions == "rotary", **own)


class PatchEmbedding(nn.Module):
    """Images [B, C, H, W] -> tokens [B, T, dim], the patches in the order of reading, behind a class token if there is
    one; and the grid of patches."""

    def __init__(self, config: FEMVisionConfig) -> None:
        super().__init__()
        dim, patch = config.hidden_size, config.patch_size
        self.channels, self.patch, self.side = config.num_channels, patch, config.patches
        self.projection = nn.Conv2d(config.num_channels, dim, patch, stride=patch)
        prefix = int(config.pooling == "token")
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if prefix else None
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(1, prefix + self.side**2, dim)) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.class_token, self.positions):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Grid]:
        self.check(pixel_values)
        x = self.projection(pixel_values.to(self.projection.weight.dtype))
        grid = Grid(*x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], 1)
        if self.positions is not None:
            x = x + self.positions_for(grid)
        return self.dropout(x), grid

    def positions_for(self, grid: Grid) -> Tensor:
        """Learned positions [1, T, dim] of a grid, bicubic between those of the training images; the class token's is
        no place in the image and stays."""
        assert self.positions is not None
        if grid == (self.side, self.side):
            return self.positions
        prefix, patches = self.positions.tensor_split([-(self.side**2)], 1)
        square = patches.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        wide = torch.promote_types(square.dtype, torch.float32)
        resized = F.interpolate(square.to(wide), grid, mode="bicubic", antialias=True).to(square.dtype)
        return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], 1)

    def check(self, pixel_values: Tensor) -> None:
        """Raise an error that names what does not fit, and what would."""
        if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
            found = getattr(pixel_values, "dtype", type(pixel_values).__name__)
            raise TypeError(f"pixel_values must be a floating-point tensor, not {found}")
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[0] == 0:
            allowed = f"[images, {self.channels}, height, width] with at least one image"
            raise ValueError(f"pixel_values has shape {shape}; allowed is {allowed}")
        for side, pixels in (("height", shape[2]), ("width", shape[3])):
            if pixels == 0 or pixels % self.patch:
                raise ValueError(
                    f"pixel_values has {side} {pixels}, which is no multiple of patch_size={self.patch}: "
                    f"the image must be resized or padded"
                )


class StochasticDepth(nn.Module):
    """Blocks are skipped at random in training, image by image (Huang et al., 2016).

    x [B, ...] * keep / P(keep), with one keep per image, 0 with probability `skipped`.
    """

    def __init__(self, skipped: float) -> None:
        super().__init__()
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.skipped == 0:
            return x
        keep = torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(1 - self.skipped).div_(1 - self.skipped)

    def extra_repr(self) -> str:
        return f"skipped={self.skipped}"


def rising(last: float, layers: int) -> list[float]:
    """Chances to be skipped, from 0 at the first layer linearly to `last` at the last."""
    return [last * layer / max(1, layers - 1) for layer in range(layers)]


class VisionBlock(FEMBlock):
    """DeiT's block, which knows where its tokens stand in the image."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]
        """x [B, T, dim]; the grid is for mixers with rotary positions."""
        with on_grid(grid):
            return super().forward(x)


class FEMVisionPreTrainedModel(FEMPreTrainedModel):
    """Loading, saving and initialization."""

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
        (the default for a single label) targets are any numbers [B, num_labels], or [B], and the loss is the mean
        squared error."""
        outputs = self.model(pixel_values=pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss: Any = None if labels is None else self._loss(logits, labels)
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
