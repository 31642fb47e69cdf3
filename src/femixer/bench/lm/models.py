"""The models that are compared: Llama of transformers, the plain transformer and FEM, of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from femixer.bench.lm.options import Options
from femixer.bench.mixers import ATTENTION
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.priors.parsing import parse_prior
from femixer.priors.softmax import CACHES

LLAMA = "llama"
RIVALS = {LLAMA: "Llama of transformers", ATTENTION: "plain transformer"}
Model = LlamaForCausalLM | FEMForCausalLM


@dataclass(frozen=True)
class Contestant:
    """prior: of FEM as on the command line, or "attention" or "llama". cache: which of the softmax prior's two, None
    for the one in its name or its default."""

    prior: str
    cache: str | None = None

    def name(self, parts: str) -> str:
        return RIVALS.get(self.prior, f"FEM {self.prior} {parts or '(mean)'}")

    def model(self, options: Options) -> Model:
        """In float32, on the device that is torch's default."""
        size = _size(options)
        if self.prior == LLAMA:
            return LlamaForCausalLM(_llama(size))
        if self.prior == ATTENTION:
            return FEMForCausalLM(FEMConfig(**size, mixer="attention"))
        name, given = parse_prior(self.prior)
        of_the_model = {option: given.pop(option) for option in ("rope", "window") if option in given}
        if self.cache is not None:
            given["cache"] = self.cache
        config = FEMConfig(**size, **of_the_model, prior=name, parts=options.parts, prior_options={name: given})
        return FEMForCausalLM(config)

    def build(self, options: Options) -> Model:
        model = self.model(options)
        model.to(**options.tensors)
        return model


def _size(options: Options) -> dict[str, Any]:
    """What the configurations of all models share."""
    return {
        "vocab_size": options.vocabulary,
        "hidden_size": options.dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads or options.heads,
        "max_position_embeddings": max(options.length, max(options.contexts) + 2 + options.decode_steps),
    }


def _llama(size: dict[str, Any]) -> LlamaConfig:
    """No token ends a text, so that all models decode as many; sdpa is the fastest attention it has everywhere."""
    width = FEMConfig(**size).intermediate_size
    fields: dict[str, Any] = {
        "intermediate_size": width,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**size, **fields)


def trained(options: Options) -> list[Contestant]:
    """The rivals first."""
    return [Contestant(prior) for prior in (*RIVALS, *options.priors)]


def decoding(options: Options) -> list[Contestant]:
    """The same, once for each cache that the softmax prior has."""
    return [Contestant(c.prior, cache) for c in trained(options) for cache in _caches(c.prior, options.parts)]


def _caches(prior: str, parts: str) -> tuple[str | None, ...]:
    """Only the softmax prior has a choice, and only where there is an exponential to keep."""
    if prior in RIVALS or "L" not in parts:
        return (None,)
    name, given = parse_prior(prior)
    if name != "softmax":
        return (None,)
    return (given["cache"],) if "cache" in given else CACHES
