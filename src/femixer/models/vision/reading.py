"""Which patches of an image the channels of a layer read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.free_energy import posterior
from femixer.gates import temperature_gate
from femixer.mixer import FreeEnergyMixer
from femixer.models.vision.model import FEMForImageClassification, FEMVisionModel
from femixer.options import check
from femixer.rotary import Grid, on_grid

QUERIES = ("token", "mean")


class PatchMaps(NamedTuple):
    """Weights of the patches, each [B, heads, channels, rows, columns] unless said otherwise. With the weight of the
    class token, where there is one, they sum to one.

    read: (1 - lam) prior + lam posterior, the change of what the channel reads with the value of each patch.
    posterior: at beta_max, as in `inspect`. prior: [B, heads, rows, columns] where all channels of a head share it.
    """

    read: Tensor
    posterior: Tensor
    prior: Tensor


@torch.no_grad()
def patch_maps(
    model: FEMVisionModel | FEMForImageClassification, pixel_values: Tensor, layer: int = -1, query: str | None = None
) -> PatchMaps:
    """What the mixer of a layer reads in images [B, C, H, W], in float64.

    query: "token", the class token; "mean", the patches, as the mean of their maps; None: as the model pools.
    """
    vision = model.model if isinstance(model, FEMForImageClassification) else model
    query = vision.config.pooling if query is None else query
    allowed = QUERIES[1:] if vision.config.pooling == "mean" else QUERIES
    check(query in allowed, "query", query, f"one of {', '.join(allowed)}, or None")
    layers = len(vision.layers)
    check(-layers <= layer < layers, "layer", layer, f"a number from {-layers} to {layers - 1}")
    block: Any = vision.layers[layer]
    if not isinstance(block.mixer, FreeEnergyMixer):
        raise ValueError(
            f"layer={layer} has mixer={type(block.mixer).__name__}, which cannot be inspected; only FEM can"
        )
    training = model.training
    try:
        model.eval()
        x, grid = vision.embedding(pixel_values)
        for before in vision.layers[: layer % layers]:
            x = before(x, grid)
        with on_grid(grid):
            return _maps(block.mixer, block.mixer_norm(x), grid, query)
    finally:
        model.train(training)


def _maps(mixer: FreeEnergyMixer, x: Tensor, grid: Grid, query: str) -> PatchMaps:
    """Of the mixer's input x [B, T, dim], whose last tokens are the patches of an image."""
    (inputs, v, lam_logits, _, _), layout = mixer.prepare(x)
    first = x.shape[1] - grid.rows * grid.columns
    queries = torch.arange(first, x.shape[1]) if query == "mean" else torch.zeros(1, dtype=torch.long)
    queries = queries.to(x.device)

    def per_head(t: Tensor) -> Tensor:
        """[B, T, heads or kv_heads, D] -> [B, H, T, D] in float64"""
        return t.double().repeat_interleave(mixer.heads // t.shape[2], 2).transpose(1, 2)

    def of_patches(weights: Tensor) -> Tensor:
        """[B, H, queries, T] or [.., T, D] -> [B, H, rows, columns] or [B, H, D, rows, columns]"""
        mean = weights.mean(2)[:, :, first:]
        return (mean if mean.dim() == 3 else mean.transpose(2, 3)).unflatten(-1, grid)

    prior = mixer.prior
    p, values = prior.weights(inputs, layout, queries), per_head(prior.over_index(v))
    p = p.expand(len(x), *p.shape[1:])
    beta = mixer.beta_max.double()[:, None]
    at_max = posterior(p, values, beta)
    read = at_max
    if lam_logits is not None:
        lam = per_head(temperature_gate(lam_logits))[:, :, queries]
        read = torch.lerp(p if p.dim() == 5 else p[..., None], at_max, lam[..., None, :])
    return PatchMaps(*(of_patches(prior.over_tokens(weights)) for weights in (read, at_max, p)))
