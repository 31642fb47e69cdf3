"""The model of a training run, as the command line describes it, and how many parameters presets have."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from femixer.models import PRESETS, FEMConfig, FEMForCausalLM, preset
from femixer.models.config import plain_refusals
from femixer.models.named import parameter_count
from femixer.options import check, check_positive, parse
from femixer.priors import PRIORS, parse_prior
from femixer.tasks.mixing import Mixing, Rivals
from femixer.training.seeding import seeded


@dataclass(frozen=True)
class ModelOptions:
    """The model."""

    preset: str = "tiny"
    """Size of the model; `femixer lm presets` lists them."""
    mixer: tuple[str, ...] = ("fem",)
    """fem, or a baseline (attention, gsa, ...; docs/baselines.md). Several names are repeated over the layers."""
    prior: tuple[str, ...] = ("softmax",)
    """Prior of the free energy mixer, also with options as in gla:decay=channel. Several are repeated over the layers:
    gla gla gla softmax makes every fourth layer softmax."""
    parts: str = "CLTG"
    """Parts of the free energy mixer: C convolution, L log-sum-exp, T temperature, G gate."""
    mixing: Mixing = field(default_factory=Mixing)
    hidden_size: int | None = None
    """Width, instead of the preset's."""
    layers: int | None = None
    """Number of layers, instead of the preset's."""
    heads: int | None = None
    """Heads of a layer, instead of the preset's."""
    kv_heads: int | None = None
    """Key/value heads, by default as many as heads."""
    window: int | None = None
    """Sliding window of the layers with the softmax prior."""
    dropout: float = 0.0
    """Dropout of the mixers' reads."""
    rivals: Rivals = field(default_factory=Rivals)
    tie_embeddings: bool = False
    """Share the token embeddings with the output projection."""

    @property
    def row(self) -> dict[str, Any]:
        """Fields of FEMConfig that say which mixers the layers have."""
        priors = one_or_all([parse_prior(prior)[0] for prior in self.prior])
        return {"mixer": one_or_all(self.mixer), "prior": priors, "parts": self.parts}

    def config(self, context: int, **tokens: Any) -> FEMConfig:
        """tokens: vocab_size, bos_token_id and eos_token_id, once they are known."""
        for name in ("mixer", "prior"):
            check(len(getattr(self, name)) > 0, name, getattr(self, name), "one name or several")
        check(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        check(0 <= self.dropout < 1, "dropout", self.dropout, "a number from 0 to below 1")
        priors = [parse_prior(prior) for prior in self.prior]
        options: dict[str, dict[str, Any]] = {}
        for name, given in priors:
            check(options.setdefault(name, given) == given, "prior", self.prior, "the same options wherever one occurs")
        sizes = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }
        self.rivals.validate({"mixer": self.mixer})
        self.mixing.validate(self.row)
        with plain_refusals():
            return preset(
                self.preset,
                **self.rivals.fields({"mixer": self.mixer}),
                **{field: value for field, value in sizes.items() if value is not None},
                **self.row,
                **self.mixing.fields(self.row),
                prior_options={name: given for name, given in options.items() if given} or None,
                window=self.window,
                mixer_dropout=self.dropout,
                tie_word_embeddings=self.tie_embeddings,
                max_position_embeddings=context,
                **tokens,
            )


def described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of FEMConfig as those of ModelOptions."""
    prior = fields.get("prior", "softmax")
    options = (fields.get("prior_options") or {}).get(prior, {})
    words = ",".join(f"{name}={str(value).lower()}" for name, value in options.items())
    return {
        "mixer": (fields["mixer"],),
        "prior": (f"{prior}:{words}" if words else prior,),
        "parts": fields.get("parts", ""),
        "rivals": Rivals.of(fields),
    }


def one_or_all(names: Sequence[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else [*names]


def build(config: FEMConfig, seed: int) -> FEMForCausalLM:
    """A model with starting weights that depend on the seed alone."""
    with seeded(seed, "weights"):
        return FEMForCausalLM(config)


@dataclass(frozen=True)
class Presets:
    """The sizes of the presets, and the parameters that each prior gives them (all parts), against plain attention."""

    vocab_size: int = 32000
    """Tokens of the vocabulary."""
    parts: str = "CLTG"
    """Parts of the free energy mixer."""


def presets(args: Sequence[str]) -> int:
    command = parse(Presets, args, "lm presets")
    check_positive(vocab_size=command.vocab_size)
    for line in preset_lines(command):
        print(line, flush=True)
    return 0


def preset_lines(command: Presets) -> Iterator[str]:
    yield f"| preset | width | layers | heads | context | plain attention | {' | '.join(PRIORS)} |"
    yield "|---|" + "---:|" * (5 + len(PRIORS))
    for name, sizes in PRESETS.items():
        plain = count(name, vocab_size=command.vocab_size, mixer="attention")
        priors = (count(name, vocab_size=command.vocab_size, prior=prior, parts=command.parts) for prior in PRIORS)
        shown = " | ".join(f"{parameters / plain - 1:+.2%}" for parameters in priors)
        yield f"| {name} | {' | '.join(map(str, sizes.values()))} | {plain:,} | {shown} |"


def count(name: str, **options: Any) -> int:
    """The parameters of a preset, whose layers are all alike: one layer is counted, and the others from two."""
    one, two = (parameter_count(preset(name, **{**options, "num_hidden_layers": layers})) for layers in (1, 2))
    return one + (preset(name).num_hidden_layers - 1) * (two - one)
