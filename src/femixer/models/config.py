"""The configuration of a language model: a transformer whose layers may each have another mixer."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from femixer import damage
from femixer.budget import BUDGETS
from femixer.models.block import check_mixer, check_used
from femixer.options import BelowOne, Positive, Rule, check, rules


def check_types(config: Any) -> None:
    """Raise a ValueError that names the first field of `config` whose value is not of its type.

    transformers checks types too, but not those of classes whose annotations are texts, as ours are.
    """
    for name, kind in declared(config.__class__).items():
        value = getattr(config, name)
        if not damage.fits(value, kind):
            raise ValueError(f"{name}={damage.shown(value)} is not allowed; choose {damage.described(kind)}")


# What fields are called in a mixer, or by other models of transformers.
NAMES = {
    "rope_theta": "rope_base",
    "rope_scaling": "rope_base",
    "rope_parameters": "rope_base",
    "sliding_window": "window",
    "dim": "hidden_size",
    "d_model": "hidden_size",
    "n_embd": "hidden_size",
    "heads": "num_attention_heads",
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "kv_heads": "num_key_value_heads",
    "bias": "mixer_bias",
    "attention_bias": "mixer_bias",
    "dropout": "mixer_dropout",
    "hidden_dropout": "mixer_dropout",
    "attention_dropout": "mixer_dropout",
    "temperature": "mixer_temperature",
}


def check_names(kind: Any, others: dict[str, Any]) -> None:
    """Raise a ValueError if one of the other names, which transformers keeps unread, is meant for a field."""
    fields = declared(kind)
    for name, value in others.items():
        known = NAMES[name] if NAMES.get(name) in fields else None
        if not name.endswith("_token_id"):  # sep_token_id is one of transformers' and looks like eos_token_id
            known = known or next(iter(difflib.get_close_matches(name, fields, 1, 0.85)), None)
        if known is not None:
            raise ValueError(f"{name}={damage.shown(value)} is not a field of {kind.__name__}; choose {known}")


def check_values(config: Any) -> None:
    """As `check_types`, and for values that the rules of their types do not allow."""
    check_types(config)
    for name, kind in declared(config.__class__).items():
        value = getattr(config, name)
        for rule in rules(kind) if value is not None else ():
            check(rule.fits(value), name, value, rule.allowed)


@functools.cache
def declared(kind: Any) -> dict[str, Any]:
    """Name -> type of the fields that a class of ours declares, or one that it comes from."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("femixer.")]
    return {name: known for each in ours for name, known in inspect.get_annotations(each, eval_str=True).items()}


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda name: name in names)


# Beyond any model: a larger number is a slip, and would be found out by what it takes to build.
LARGEST, MOST_LAYERS = 2**31 - 1, 10_000
Size = Annotated[int, Rule(f"a whole number from 1 to {LARGEST:,}", lambda x: 0 < x <= LARGEST)]
Layers = Annotated[int, Rule(f"a whole number from 1 to {MOST_LAYERS:,}", lambda x: 0 < x <= MOST_LAYERS)]

HEADS_STYLE = "fem_heads"  # of the mixers in a plan of tensor parallelism


@strict
class MixerConfig(PreTrainedConfig):
    """Fields of all models' configurations: which mixers, and how they read.

    mixer and prior are one name for all layers, or a list of names that is repeated over the layers, so that
    prior=["gla", "gla", "gla", "softmax"] makes every fourth layer softmax.

    Attributes:
        mixer: "fem", the free energy mixer, or the name of a baseline.
        prior: Of free energy mixers, as the following up to mixer_temperature (see FreeEnergyMixer).
        parts: Any subset of C, L, T and G.
        budget: "attention" or "balanced".
        value_dim: Width of the values over all heads; None: the budget decides.
        start: "paper" or "prior".
        readout: "free_energy" or "posterior_mean".
        mixer_temperature: "learned" or "fixed": the mixer's temperature; transformers' own sets sampling.
        mixer_options: Options by name of the baseline, such as {"gsa": {"slots": 64}}.
        prior_options: Options by name of the prior, such as {"gla": {"decay": "channel"}}.
    """

    mixer: str | list[str] = "fem"
    prior: str | list[str] = "softmax"
    parts: str = "CLTG"
    budget: Annotated[str, one_of(*BUDGETS)] = "attention"
    value_dim: Size | None = None
    start: str = "paper"
    readout: str = "free_energy"
    mixer_temperature: str = "learned"
    mixer_options: dict[str, Any] | None = None
    prior_options: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(type(self), kwargs)
        check_types(self)
        for name, value in self._usual().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__(**kwargs)

    def _usual(self) -> dict[str, Any]:
        """Values of fields that follow from others where they are None."""
        return {}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: see FEMPreTrainedModel."""

    def _layers(self, **others: Any) -> FEMConfig:
        """The layers as a configuration from which their mixers are built, with other fields of it."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        same = {name: getattr(self, name) for name in (*names, *inspect.get_annotations(MixerConfig))}
        return FEMConfig(**same, **others)

    def at(self, field: str, layer: int) -> str:
        """`mixer` or `prior` of a layer."""
        names = getattr(self, field)
        if not names:
            raise ValueError(f"{field}={names!r} must be a name or a list of names")
        return names if isinstance(names, str) else names[layer % len(names)]


@strict
class FEMConfig(MixerConfig):
    """Sizes, mixers and tokens of a language model; the fields of MixerConfig, and those below.

    Attributes:
        vocab_size: Number of tokens that the model knows.
        hidden_size: Width of the tokens.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Heads of every mixer.
        num_key_value_heads: None: as many as num_attention_heads.
        intermediate_size: Width of SwiGLU; None: 8/3 hidden_size, up to a multiple of 256.
        causal: False makes an encoder, in which every token reads all others.
        rope: Rotary positions; None: where the prior has queries and keys.
        rope_base: Base of their frequencies.
        window: Sliding window of the layers with the prior softmax or fox.
        mixer_bias: Whether the mixers' projections have biases.
        mixer_dropout: Dropout of the mixers' reads.
        classifier_dropout: Dropout before the head of a classifier.
        rms_norm_eps: Epsilon of the norms.
        max_position_embeddings: Length of the training sequences; models read longer ones too, and only the filters of
            mixer="hyena" depend on it.
        tie_word_embeddings: Whether the output projection has the weights of the token embeddings.
        use_cache: Whether generate() keeps states.
        pad_token_id: Padding.
        bos_token_id: Begins a document.
        eos_token_id: Ends a document.
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

    vocab_size: Size = 32000
    hidden_size: Size = 512
    num_hidden_layers: Layers = 8
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = None
    intermediate_size: Size | None = None
    causal: bool = True
    rope: bool | None = None
    rope_base: Positive = 10000.0
    window: Size | None = None
    mixer_bias: bool = False
    mixer_dropout: BelowOne = 0.0
    classifier_dropout: BelowOne = 0.0
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: Size = 4096
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def _usual(self) -> dict[str, Any]:
        inner = 256 * -(-8 * self.hidden_size // (3 * 256))
        return {"num_key_value_heads": self.num_attention_heads, "intermediate_size": inner}

    def validate_architecture(self) -> None:
        """Called by transformers after a change: every layer must be possible."""
        check_values(self)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            for token in [tokens] if not isinstance(tokens := getattr(self, name), list) else tokens:
                known = f"a token below vocab_size={self.vocab_size}, or None"
                check(token is None or 0 <= token < self.vocab_size, name, token, known)
        for layer in range(min(self.num_hidden_layers, 64)):
            check_mixer(self, layer)
        check_used(self)


@contextmanager
def plain_refusals() -> Iterator[None]:
    """What a configuration refuses as the ValueError that it raised, without what transformers wraps around it."""
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
