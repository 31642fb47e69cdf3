"""The one block of all models, x + drop(mixer(norm(x))), then x + drop(mlp(norm(x))), its parts, and the mixer of a
layer as the configuration names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from femixer.baselines import BASELINES
from femixer.kernels.rms_norm import rms_norm
from femixer.mixer import READOUTS, STARTS, TEMPERATURES, FreeEnergyMixer, check_read
from femixer.options import check
from femixer.priors import SoftmaxPrior, prior_class

if TYPE_CHECKING:
    from femixer.models.config import FEMConfig


class RMSNorm(nn.RMSNorm):
    """torch's, by the operator."""

    def forward(self, x: Tensor) -> Tensor:
        if self.eps is None or self.weight is None:
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down"""

    def __init__(self, dim: int, width: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False, **factory_kwargs)
        self.up_proj = nn.Linear(dim, width, bias=False, **factory_kwargs)
        self.down_proj = nn.Linear(width, dim, bias=False, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELUMLP(nn.Module):
    """gelu(x W_up + b_up) W_down + b_down"""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class FEMBlock(GradientCheckpointingLayer):
    """Pre-norm block around any mixer with FreeEnergyMixer's signature.

    norm(dim, eps=eps) and mlp(dim, width) make its other parts. drop: what happens to both branches before they are
    added, such as dropout.
    """

    def __init__(
        self,
        dim: int,
        mixer: nn.Module,
        width: int,
        eps: float,
        layer: int,
        *,
        norm: Callable[..., nn.Module] = RMSNorm,
        mlp: Callable[[int, int], nn.Module] = SwiGLU,
        drop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = norm(dim, eps=eps)
        self.mixer = mixer
        self.mlp_norm = norm(dim, eps=eps)
        self.mlp = mlp(dim, width)
        self.drop = nn.Identity() if drop is None else drop

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Any = None,
        read: slice | None = None,
    ) -> Tensor:
        """x [B, T, dim]; mask, segments as for the mixer; cache: an FEMCache, which then holds the state (transformers
        would drop one by its own name where it checkpoints gradients, even if none are computed); read: which positions
        to return, all by default."""
        normed = self.mixer_norm(x)
        if cache is None:
            mixed = self.mixer(normed, mask=mask, segments=segments)
        else:
            before = cache.states[self.layer]
            mixed, after = self.mixer(normed, mask=mask, segments=segments, state=before, return_state=True)
            cache.states[self.layer] = after
        if read is not None:
            x, mixed = x[:, read], mixed[:, read]
        x = x + self.drop(mixed)
        return x + self.drop(self.mlp(self.mlp_norm(x)))


MIXERS = ("fem", *BASELINES)
# What a baseline's constructor takes from other fields of the configuration than mixer_options.
OF_CONFIG = ("dim", "causal", "bias", "dropout", "kv_heads", "rope", "rope_base", "device", "dtype", "common")


def options_of(mixer: str) -> tuple[str, ...]:
    """The names that mixer_options may give for a baseline; "fem" has fields of its own."""
    if mixer not in BASELINES:
        return ()
    return tuple(name for name in inspect.signature(BASELINES[mixer]).parameters if name not in OF_CONFIG)


def takes_rope(mixer: str) -> bool:
    """Whether rotary positions may be asked of a mixer; of "fem" its priors decide."""
    return mixer not in BASELINES or "rope" in inspect.signature(BASELINES[mixer]).parameters


def has_window(prior: str) -> bool:
    return issubclass(prior_class(prior), SoftmaxPrior)


def check_mixer(config: FEMConfig, layer: int) -> None:
    """Raise a ValueError that names the field, unless the layer's mixer and prior are known and their options used."""
    name = config.at("mixer", layer)
    if name not in MIXERS:
        raise ValueError(f"mixer={name!r} is unknown; choose one of {', '.join(MIXERS)}")
    prior_class(config.at("prior", layer))

    def fits(possible: bool, field: str, instead: str) -> None:
        if not possible:
            raise ValueError(f"{field}={getattr(config, field)!r} does not fit mixer={name!r}; {instead}")

    if name == "fem":
        check_read(config.parts, config.start, config.readout, config.mixer_temperature)
    elif config.mixer == name:  # in a hybrid, other layers have it
        for field, (usual, _) in (("start", STARTS), ("readout", READOUTS), ("mixer_temperature", TEMPERATURES)):
            fits(getattr(config, field) == usual, field, f"choose {usual!r}, or mixer='fem'")
    if not config.causal:
        check_encoder(name)
    if name in BASELINES:
        windows = config.window is not None and has_window(config.at("prior", layer))
        fits(not windows, "window", "only mixer='fem' has windows")
        heads = config.num_attention_heads
        takes_kv_heads = "kv_heads" in inspect.signature(BASELINES[name]).parameters
        fits(takes_kv_heads or config.num_key_value_heads == heads, "num_key_value_heads", f"choose {heads} or None")
        fits(not config.rope or takes_rope(name), "rope", "choose None")
    for field in ("mixer", "prior"):
        _check_options(config, field)
    for mixer, options in (config.mixer_options or {}).items():
        for option in options:
            if option not in options_of(mixer):
                allowed = ", ".join(options_of(mixer)) or "none; priors have prior_options"
                raise ValueError(f"mixer_options has {option!r} for mixer={mixer!r}; its options are {allowed}")


def check_used(config: FEMConfig) -> None:
    """Raise a ValueError unless some layer uses each field that only some mixers and priors have."""
    layers = {(config.at("mixer", layer), config.at("prior", layer)) for layer in range(config.num_hidden_layers)}
    priors = {prior for mixer, prior in layers if mixer == "fem"}
    with_keys = any(prior_class(prior).queries_and_keys for prior in priors)
    rivals = {mixer for mixer, _ in layers if mixer in BASELINES}
    known = {name for mixer in rivals for name in inspect.signature(BASELINES[mixer]).parameters}
    heads, fem = config.num_attention_heads, (bool(priors), "no layer is a free energy mixer")
    no_keys = "no layer is a free energy mixer with queries and keys"
    fields = {
        "budget": ("attention", with_keys, no_keys),
        "value_dim": (None, *fem),
        "window": (None, any(map(has_window, priors)), "no layer has the prior softmax or fox"),
        "num_key_value_heads": (heads, with_keys or "kv_heads" in known, "no layer has queries and keys"),
        "prior": ("softmax", *fem),
        "prior_options": (None, *fem),
    }
    for field, (usual, used, why) in fields.items():
        given = getattr(config, field)
        same = given in (usual, [usual]) or (usual is None and given == {})  # spelled otherwise
        check(used or same, field, given, f"{usual!r}: {why}")
    rotates = with_keys or "rope" in known
    check(rotates or not config.rope, "rope", config.rope, "None: no layer rotates queries and keys")


def check_encoder(mixer: str) -> None:
    """Raise a ValueError unless the mixer can be that of an encoder."""
    encoders = ("fem", *(name for name, baseline in BASELINES.items() if baseline.encoder))
    allowed = f"one of {', '.join(encoders)}: the others are causal by definition"
    check(mixer in encoders, "mixer", mixer, allowed)


def _check_options(config: FEMConfig, field: str) -> None:
    """mixer_options and prior_options are dicts per name of what the model has."""
    given = getattr(config, f"{field}_options")
    used = {config.at(field, layer) for layer in range(config.num_hidden_layers)}
    for name, options in (given or {}).items():
        if name not in used or not isinstance(options, dict):
            raise ValueError(
                f"{field}_options={given!r} must give options per {field} of the model, "
                f"as {{{min(used)!r}: {{...}}}}; its {field}s are {', '.join(sorted(used))}"
            )


def build_mixer(config: FEMConfig, layer: int) -> nn.Module:
    name, prior = config.at("mixer", layer), config.at("prior", layer)
    shared: dict[str, Any] = {
        "dim": config.hidden_size,
        "heads": config.num_attention_heads,
        "causal": config.causal,
        "bias": config.mixer_bias,
        "dropout": config.mixer_dropout,
    }
    if name in BASELINES:
        place = {
            "kv_heads": config.num_key_value_heads,
            "rope": config.rope is not False,
            "rope_base": config.rope_base,
            # Published layers that start differently at each depth of a model, or by the length of its sequences.
            "depth": layer + 1,
            "lower_bound": layer / config.num_hidden_layers,
            "length": max(2, config.max_position_embeddings),
        }
        known = inspect.signature(BASELINES[name]).parameters
        shared.update({key: value for key, value in place.items() if key in known})
        return BASELINES[name](**{**shared, **(config.mixer_options or {}).get(name, {})})
    options = dict((config.prior_options or {}).get(prior, {}))
    if prior_class(prior).queries_and_keys:
        options.setdefault("rope_base", config.rope_base)
        shared.update(kv_heads=config.num_key_value_heads, rope=config.rope, budget=config.budget)
    if has_window(prior):
        shared["window"] = config.window
    return FreeEnergyMixer(
        **shared,
        prior=prior,
        parts=config.parts,
        value_dim=config.value_dim,
        start=config.start,
        readout=config.readout,
        temperature=config.mixer_temperature,
        prior_options=options,
    )
