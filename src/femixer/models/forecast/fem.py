"""FEMForecaster: patches of every channel as tokens, each after a token of all channels, read by any mixer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.block import GELUMLP, FEMBlock, RMSNorm, build_mixer
from femixer.models.forecast.forecaster import Dropout, ForecastConfig, Forecaster, squared_error
from femixer.models.forecast.window import Covariates, Normalised, ascending, normalised_to_recent, pinball_error
from femixer.models.forecast.window import patched as covariate_patches

EPS = 1e-5


class Patches(NamedTuple):
    """Normalised patches [B, C, N, horizon], zeros before the first point and where nothing was observed; which of
    their points were observed (None: all); how to undo the normalisation; covariates of the whole window."""

    values: Tensor
    observed: Tensor | None
    norm: Normalised
    covariates: Covariates | None = None


class FEMForecaster(Forecaster):
    """Autoregressive in patches of `horizon` points: the output at the last patch is the forecast.

        z = (window - mean of its last `horizon` points) / std of the window, per window and channel
        patches of `horizon` points without overlap, the first one filled with zeros on the left
        context_n = norm(W_p (W_c z_n)), over channels and then patch -> width;   own_n = norm(W_o z_n)
        tokens of a channel: context_1, own_1, context_2, own_2, ... + position + (channel x position) embeddings
        forecast = W norm(layers(norm(tokens)))[own_N], the normalisation undone

    Every channel is a sequence of its own with shared weights. The protocol is that of the SAMoVAR code
    (LJC-FVNR/Structural-Aligned-Mixture-of-VAR, models/Autoregressive.py), which the paper follows; with it the
    loss is the squared error of the forecast plus, in the normalised space, that of every own token's output and the
    patch after it. What the paper leaves open is chosen here as: no autoregressive (SAMoVAR) base besides the mixer;
    width 32 int(sqrt(channels)), 64 for ETT; rotary positions as the mixer has them by default, besides the learned
    ones (rope=False turns them off); the conditioner as in every FreeEnergyMixer; biases in all projections; all
    weights N(0, 0.02).

    Covariates, where there are any, are added before the norms, the same for all channels: to context_n those of patch
    n, known and past, to own_n the known ones of the patch that follows, which is forecast there. Quantiles are
    increments around the forecast (`window.py`), by a second map of the same token; their pinball loss is added.

    Missing values: mean and std are of the observed points; a patch with some observed points has zeros (its window's
    recent mean) at the others; a token without any observed point is padding to the mixer, except the last own one,
    at which the forecast is read.
    """

    kind = "fem"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FEMBlock"]  # noqa: RUF012

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        layers, _, dim, inner, dropout = config.sizes()
        stack, patch = config.stack(), config.horizon
        self.patches = -(-config.lookback // patch)
        self.across = nn.Linear(config.channels, config.channels)
        self.context_embedding, self.own_embedding = nn.Linear(patch, dim), nn.Linear(patch, dim)
        self.context_norm, self.own_norm = RMSNorm(dim, eps=EPS), RMSNorm(dim, eps=EPS)
        self.positions = nn.Embedding(2 * self.patches, dim)
        self.channel_positions = nn.Embedding(config.channels * 2 * self.patches, dim)
        self.dropout = Dropout(dropout)
        self.input_norm = RMSNorm(dim, eps=EPS)
        self.layers = nn.ModuleList(
            FEMBlock(dim, build_mixer(stack, layer), inner, EPS, layer, mlp=GELUMLP, drop=Dropout(dropout))
            for layer in range(layers)
        )
        self.output_norm = RMSNorm(dim, eps=EPS)
        self.head = nn.Linear(dim, patch)
        known, past = (len(names or ()) for names in (config.known_covariates, config.past_covariates))
        if known + past:
            self.covariates_so_far = nn.Linear((known + past) * patch, dim)
        if known:
            self.covariates_to_come = nn.Linear(known * patch, dim)
        if config.quantiles:
            self.quantile_head = nn.Linear(dim, patch * len(config.quantiles))
        self.post_init()

    def forecast(self, window: Tensor, observed: Tensor | None, covariates: Covariates | None = None) -> Tensor:
        patches = self.patched(window, observed, covariates)
        return patches.norm.undone(self.outputs(patches, last_only=True).squeeze(2))

    def forecast_quantiles(
        self, window: Tensor, observed: Tensor | None, covariates: Covariates | None = None
    ) -> tuple[Tensor, Tensor]:
        patches = self.patched(window, observed, covariates)
        features = self.features(patches, last_only=True)
        return patches.norm.undone(self.head(features).squeeze(2)), self.quantiles(features, patches.norm)

    def quantiles(self, features: Tensor, norm: Normalised) -> Tensor:
        """[B, horizon, C, Q] of the last token's features [B, C, N, width]."""
        last = features[:, :, -1]
        raw = self.quantile_head(last).unflatten(-1, (self.config.horizon, -1))
        spread = ascending(self.head(last), raw)
        return torch.stack([norm.undone(each) for each in spread.unbind(-1)], -1)

    def score(
        self,
        window: Tensor,
        observed: Tensor | None,
        future: Tensor,
        future_observed: Tensor | None,
        covariates: Covariates | None = None,
    ) -> dict[str, Tensor]:
        patches = self.patched(window, observed, covariates)
        features = self.features(patches)
        outputs = self.head(features)
        forecast = patches.norm.undone(outputs[:, :, -1])
        losses = {"loss": squared_error(forecast, future, future_observed)}
        if self.config.quantiles:
            spread = self.quantiles(features, patches.norm)
            losses["quantiles"] = pinball_error(spread, future, future_observed, self.config.quantiles)
        if self.patches > 1:
            scored = None
            if patches.observed is not None:
                # A patch without observed points says nothing about the next one.
                scored = patches.observed[:, :, 1:] & patches.observed[:, :, :-1].any(-1, keepdim=True)
            losses["next_patch"] = squared_error(outputs[:, :, :-1], patches.values[:, :, 1:], scored)
        return losses

    def patched(self, window: Tensor, observed: Tensor | None, covariates: Covariates | None = None) -> Patches:
        """window and observed [B, lookback, C] as patches."""
        patch = self.config.horizon
        before = (self.patches * patch - window.shape[1], 0)
        norm = normalised_to_recent(window, observed, patch)
        values = F.pad(norm.values, before).unflatten(-1, (-1, patch))
        if observed is not None:
            observed = F.pad(observed.transpose(1, 2), before).unflatten(-1, (-1, patch))
        return Patches(values, observed, norm, covariates)

    def tokens(self, patches: Tensor, covariates: Covariates | None = None) -> Tensor:
        """[B, C, N, horizon] -> [B, C, 2 N, width]: of each patch the context token and then its own."""
        mixed = torch.matmul(self.across.weight, patches.flatten(2)) + self.across.bias[:, None]
        # Sequences [B C, N, .] as in the layers: our norm takes whatever has 1 in its second place for a single token.
        context = self.context_embedding(mixed.view_as(patches).flatten(0, 1))
        own = self.own_embedding(patches.flatten(0, 1))
        if covariates is not None:
            so_far, to_come = self.embedded(covariates)
            channels = patches.shape[1]
            context = context + so_far.repeat_interleave(channels, 0)
            own = own if to_come is None else own + to_come.repeat_interleave(channels, 0)
        context, own = self.context_norm(context), self.own_norm(own)
        return torch.stack([context, own], 2).flatten(1, 2).unflatten(0, patches.shape[:2])

    def embedded(self, covariates: Covariates) -> tuple[Tensor, Tensor | None]:
        """[B, N, width] each: covariates of every patch, and the known ones of the patch after it."""
        count, patch = self.patches, self.config.horizon
        known = covariate_patches(covariates.known, count + 1, patch)
        past = covariate_patches(covariates.past, count, patch)
        so_far = self.covariates_so_far(torch.cat([known[:, :-1], past], -1))
        return so_far, self.covariates_to_come(known[:, 1:]) if known.shape[-1] else None

    def outputs(self, patches: Patches, last_only: bool = False) -> Tensor:
        """[B, C, N, horizon]: at each own token the normalised patch that follows; or [B, C, 1, horizon], the last."""
        return self.head(self.features(patches, last_only))

    def features(self, patches: Patches, last_only: bool = False) -> Tensor:
        """[B, C, N, width] at own tokens, or [B, C, 1, width]."""
        batch, channels = patches.values.shape[:2]
        place = self.positions.weight + self.channel_positions.weight.view(channels, 2 * self.patches, -1)
        x = self.input_norm((self.dropout(self.tokens(patches.values, patches.covariates)) + place).flatten(0, 1))
        mask = real_tokens(patches.observed)
        for layer in self.layers[:-1]:
            x = layer(x, mask)
        # What is not read needs no MLP after the last mixer.
        read = slice(-1, None) if last_only else slice(1, None, 2)
        x = self.layers[-1](x, mask, read=read)
        return self.output_norm(x).unflatten(0, (batch, channels))


def real_tokens(observed: Tensor | None) -> Tensor | None:
    """bool [B C, 2 N] of patches observed [B, C, N, horizon]: not padding; None where no token is."""
    if observed is None:
        return None
    own = observed.any(-1)
    context = own.any(1, keepdim=True).expand_as(own)
    own = torch.cat([own[..., :-1], torch.ones_like(own[..., -1:])], -1)
    real = torch.stack([context, own], -1).flatten(2).flatten(0, 1)
    return None if not torch.compiler.is_compiling() and bool(real.all()) else real
