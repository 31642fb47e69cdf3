"""The configuration of a language model: a transformer whose layers may each have another mixer."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Union, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from femixer import damage
from femixer.models.block import check_budget, check_mixer
from femixer.options import check


def check_types(config: Any) -> None:
    """Raise a ValueError that names the first field of `config` whose value is not of its type.

    transformers checks types too, but not those of classes whose annotations are texts, as ours are.
    """
    for name, kind in declared(type(config)).items():
        value = getattr(config, name)
        if not fits(value, kind):
            raise ValueError(f"{name}={damage.shown(value)} is not allowed; choose {described(kind)}")


# What fields are called in a mixer, or by other models of transformers.
NAMES = {
    "rope_theta": "rope_base",
    "sliding_window": "window",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "bias": "mixer_bias",
    "dropout": "mixer_dropout",
    "temperature": "mixer_temperature",
}


def check_names(kind: Any, others: dict[str, Any]) -> None:
    """Raise a ValueError if one of the other names, which transformers keeps and nobody reads, is meant for a field."""
    fields = declared(kind)
    for name, value in others.items():
        known = NAMES[name] if NAMES.get(name) in fields else None
        if not name.endswith("_token_id"):  # sep_token_id is one of transformers' and looks like eos_token_id
            known = known or next(iter(difflib.get_close_matches(name, fields, 1, 0.85)), None)
        if known is not None:
            raise ValueError(f"{name}={damage.shown(value)} is not a field of {kind.__name__}; choose {known}")


def declared(kind: Any) -> dict[str, Any]:
    """Name -> type of the fields that a class of ours declares, or one that it comes from."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("femixer.")]
    return {name: known for each in ours for name, known in inspect.get_annotations(each, eval_str=True).items()}


def fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    return damage.fits(value, kind)


def described(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, inner))
    if origin is list:
        return f"a list ({described(inner[0])} each)"
    return damage.KINDS.get(kind, "an object")


# Beyond any model: a larger number is a slip, and would be found out by what it takes to build.
LARGEST, MOST_LAYERS = 2**31 - 1, 10_000

HEADS_STYLE = "fem_heads"  # of the mixers in a plan of tensor parallelism


@strict
class MixerConfig(PreTrainedConfig):
    """What the configurations of all models have: which mixers, and how these read.

    mixer, prior: one name for all layers, or a list of names that is repeated over the layers, so that
    prior=["gla", "gla", "gla", "softmax"] makes every fourth layer softmax. prior_options, mixer_options: per name of a
    prior or of a baseline its options, as {"gla": {"decay": "channel"}}.
    """

    mixer: str | list[str] = "fem"  # "fem", or a baseline: see femixer.models.block
    prior: str | list[str] = "softmax"
    parts: str = "CLTG"
    budget: str = "attention"
    value_dim: int | None = None  # width of a free energy mixer's values over all heads; None: the budget decides
    start: str = "paper"  # of FreeEnergyMixer, or "prior"
    readout: str = "free_energy"  # of FreeEnergyMixer, or "posterior_mean"
    mixer_temperature: str = "learned"  # temperature of FreeEnergyMixer, or "fixed"; transformers has the short name
    mixer_options: dict[str, Any] | None = None
    prior_options: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(type(self), kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: see FEMPreTrainedModel."""

    def mixer_fields(self) -> dict[str, Any]:
        """These, for the FEMConfig of the layers."""
        return {name: getattr(self, name) for name in inspect.get_annotations(MixerConfig)}


@strict
class FEMConfig(MixerConfig):
    """Sizes, mixers and tokens of a model.

    mixer ... prior_options: as in MixerConfig. max_position_embeddings is the length of the training sequences; longer
    ones may be read, and nothing depends on it but the filters of mixer="hyena". causal=False makes an encoder, in
    which every token reads all others.
    """

    model_type = "fem"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  transformers adds to it
    # Tensor parallelism by transformers; femixer.models.over_ranks has the style of the mixers.
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.mixer": HEADS_STYLE,
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None  # None: as many as num_attention_heads
    intermediate_size: int | None = None  # width of SwiGLU; None: 8/3 hidden_size, up to a multiple of 256
    causal: bool = True
    rope: bool | None = None  # None: on where the prior has queries and keys
    rope_base: float = 10000.0
    window: int | None = None  # sliding window of the layers with the prior softmax or fox
    mixer_bias: bool = False
    mixer_dropout: float = 0.0
    classifier_dropout: float = 0.0  # before the head of a classifier
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * -(-8 * self.hidden_size // (3 * 256))
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers after a change: every layer must be possible."""
        check_types(self)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            size = getattr(self, name)
            check(0 < size <= LARGEST, name, size, f"a whole number from 1 to {LARGEST:,}")
        layers = self.num_hidden_layers
        check(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"a whole number from 1 to {MOST_LAYERS:,}")
        for name in ("mixer", "prior"):
            if not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a name or a list of names")
        for name in ("classifier_dropout", "mixer_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0 and below 1")
        for name in ("rms_norm_eps", "rope_base"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        for name in ("window", "num_key_value_heads", "value_dim", "max_position_embeddings"):
            size = getattr(self, name)
            check(size is None or 0 < size <= LARGEST, name, size, f"a whole number from 1 to {LARGEST:,}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            for token in [tokens] if not isinstance(tokens := getattr(self, name), list) else tokens:
                known = f"a token below vocab_size={self.vocab_size}, or None"
                check(token is None or 0 <= token < self.vocab_size, name, token, known)
        for layer in range(min(self.num_hidden_layers, 64)):
            check_mixer(self, layer)
        check_budget(self)

    def at(self, field: str, layer: int) -> str:
        """`mixer` or `prior` of a layer."""
        names = getattr(self, field)
        return names if isinstance(names, str) else names[layer % len(names)]


@contextmanager
def plain_refusals() -> Iterator[None]:
    """What a configuration refuses as the ValueError that it raised, without what transformers wraps around it."""
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
