"""The model of a training run, as the command line describes it; how many parameters presets have; and a model on the
disk with its tokenizer: checking and loading it.

A model folder is what `save_pretrained` of model and tokenizer write: config.json, model.safetensors and the
tokenizer's files. `femixer lm train` keeps one as `model/` in its results folder.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from femixer.damage import watch_logits
from femixer.models import PRESETS, FEMConfig, FEMForCausalLM, preset
from femixer.models.config import plain_refusals
from femixer.models.named import Mixing, Rivals, parameter_count
from femixer.optional import require
from femixer.options import BelowOne, Count, check, check_options, given, parse
from femixer.priors import PRIORS, parse_prior
from femixer.reporting import Table, as_markdown
from femixer.training.results import model_folder
from femixer.training.seeding import seeded


@dataclass(frozen=True)
class ModelOptions:
    """The model."""

    preset: str = "tiny"
    """Size of the model; `femixer lm presets` lists them."""
    mixer: tuple[str, ...] = ("fem",)
    """fem, or a baseline (attention, gsa, ...; docs/baselines.md). Several names are repeated over the layers."""
    prior: tuple[str, ...] = ("softmax",)
    """Prior of the free energy mixer (docs/priors.md): softmax, gla, ..., or with options, gla:decay=channel.
    Several are repeated over the layers: gla gla gla softmax makes every fourth layer softmax."""
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
    """Sliding window of the layers with the prior softmax or fox."""
    dropout: BelowOne = 0.0
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
        check_options(self)
        for name in ("mixer", "prior"):
            check(len(getattr(self, name)) > 0, name, getattr(self, name), "one name or several")
        check(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        priors = [parse_prior(prior) for prior in self.prior]
        options: dict[str, dict[str, Any]] = {}
        for name, own in priors:
            check(options.setdefault(name, own) == own, "prior", self.prior, "the same options wherever one occurs")
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        self.rivals.validate(self.row)
        self.mixing.validate(self.row)
        with plain_refusals():
            return preset(
                self.preset,
                **self.rivals.fields(self.row),
                **given(hidden_size=self.hidden_size, num_hidden_layers=self.layers, **heads),
                **self.row,
                **self.mixing.fields(self.row),
                prior_options={name: own for name, own in options.items() if own} or None,
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

    vocab_size: Count = 32000
    """Tokens of the vocabulary."""
    parts: str = "CLTG"
    """Parts of the free energy mixer."""


def presets(args: Sequence[str]) -> int:
    command = parse(Presets, args, "lm presets")
    rows = []
    for name, sizes in PRESETS.items():
        plain = count(name, vocab_size=command.vocab_size, mixer="attention")
        priors = (count(name, vocab_size=command.vocab_size, prior=prior, parts=command.parts) for prior in PRIORS)
        shown = (f"{parameters / plain - 1:+.2%}" for parameters in priors)
        rows.append([name, *map(str, sizes.values()), f"{plain:,}", *shown])
    columns = ("preset", "width", "layers", "heads", "context", "plain attention", *PRIORS)
    print(as_markdown(Table.of(columns, rows)), end="")
    return 0


def count(name: str, **options: Any) -> int:
    """The parameters of a preset, whose layers are all alike: one layer is counted, and the others from two."""
    one, two = (parameter_count(preset(name, **{**options, "num_hidden_layers": layers})) for layers in (1, 2))
    return one + (preset(name).num_hidden_layers - 1) * (two - one)


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SPARE_ROWS = 1024
"""Rows of an embedding beyond the vocabulary are padding for speed; more of them mean another tokenizer."""


@dataclass(frozen=True)
class Placement:
    """Where and how precisely the model computes."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps, ...; auto takes a GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is what the checkpoint was saved in."""

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without that device
            told = f"cannot be used here: {str(error).splitlines()[0]}; try cpu"
            raise ValueError(f"device={self.device!r} {told}") from None

    def validate(self) -> None:
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        self.torch_device()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    _transformers()
    from femixer.models.files import saved_tokenizer

    if (folder / "preparation.json").is_file():
        raise ValueError(f"checkpoint={str(folder)!r} is a model of images; see `femixer vision maps`")
    return saved_tokenizer(folder)


def load(checkpoint: Path, placement: Placement | None = None, writes: bool = True) -> tuple[Any, Any]:
    """Model, in evaluation mode, and tokenizer of a checkpoint (a model folder or a results folder).

    writes: the model must be one that continues a text. Its logits are checked in every pass: NaN is no answer.
    """
    placement = placement or Placement()
    placement.validate()
    folder = model_folder(checkpoint)
    tokenizer = load_tokenizer(folder)
    dtype = "auto" if placement.dtype == "auto" else getattr(torch, placement.dtype)
    _transformers()
    from femixer import surgery

    model = surgery.load(folder, dtype=dtype)
    if writes:
        kind = model.config.model_type.removeprefix(surgery.families.PREFIX)
        able = model.can_generate() and (kind not in surgery.families.ENCODERS or model.config.is_decoder)
        state = f"is a {type(model).__name__}, which does not continue a text"
        check(able, "checkpoint", str(folder), "a causal language model", state)
        surgery.check_ends(folder, model)
    rows, words = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    state = f"has a tokenizer of {words} tokens and a model of {rows}"
    check(words <= rows < words + SPARE_ROWS, "checkpoint", str(folder), "those that belong together", state)
    watch_logits(model, str(folder))
    return model.to(placement.torch_device()).eval(), tokenizer


def check_positions(model: Any, tokens: int, name: str, value: Any) -> None:
    """Raise a ValueError that names the option if the model has an embedding per position, and too few of them."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"wpe", "embed_positions", "position_embeddings"}:
        limit = int(model.config.max_position_embeddings)
        why = f"fewer: the model has {limit} positions, and this needs {tokens} (prompt and new tokens together)"
        check(tokens <= limit, name, value, why)


def fingerprint(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files: another model or tokenizer has another one."""
    digest = hashlib.sha256()
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".safetensors", ".json", ".model")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def _transformers() -> Any:
    """transformers, knowing our models and those that we upgrade."""
    transformers = require("transformers", "lm")
    import femixer.models
    import femixer.surgery  # noqa: F401

    if not sys.stderr.isatty():  # a bar drawn into a file is only noise
        transformers.utils.logging.disable_progress_bar()
    return transformers
