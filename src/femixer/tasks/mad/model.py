"""The models of MAD: a language model, and for compression an autoencoder with the same stack as encoder."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from femixer.mixer import FreeEnergyMixer
from femixer.models import FEMConfig, FEMForCausalLM, FEMModel
from femixer.models.block import RMSNorm
from femixer.models.config import plain_refusals
from femixer.tasks.mad.data import TASKS
from femixer.training.seeding import seeded


class Autoencoder(nn.Module):
    """tokens [B, T] -> logits [B, T, V] of the same tokens, all from one vector: the encoder's at the last position.

        h = encoder(tokens)[:, -1]                      no norm at its end: the decoder begins with one
        logits[:, t] = decoder(h + position(t))         norm, Linear, GELU, norm, Linear, GELU, norm, Linear

    as in athms/mad-lab (mad/model/auto_encoder.py), whose decoder has biases.
    """

    def __init__(self, config: FEMConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.encoder = FEMModel(config)
        self.encoder.norm = nn.Identity()  # type: ignore[assignment]
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [RMSNorm(dim, eps=eps), nn.Linear(dim, dim), nn.GELU()]
        self.decoder = nn.Sequential(*layers, RMSNorm(dim, eps=eps), nn.Linear(dim, config.vocab_size))
        for layer in self.decoder:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        """use_cache: only for the signature of a language model."""
        encoded = self.encoder(input_ids, use_cache=False).last_hidden_state[:, -1:]
        position = positions(input_ids.shape[1], encoded.shape[-1]).to(encoded)
        return CausalLMOutputWithPast(logits=self.decoder(encoded + position))


def positions(length: int, dim: int) -> Tensor:
    """[T, dim]: sin(t w_i) and then cos(t w_i), w_i = 10000^(-i / (dim/2 - 1)) for i = 0 ... dim/2 - 1."""
    half = dim // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, dim - 2 * half)).float()


def build(task: str, fields: Mapping[str, Any], seed: int, gates: str = "own") -> nn.Module:
    """The model of a task with these fields of FEMConfig; its starting weights depend on the seed alone.

    gates="torch": also gates, decays and conditioners start as torch starts linear maps, which no mixer asks for.
    """
    with seeded(seed, "weights"):
        with plain_refusals():
            config = FEMConfig(**fields)
        model: nn.Module
        if TASKS[task].last_position_only:
            model = Autoencoder(config)
        else:
            model = FEMForCausalLM(config)
            start_as_torch(model)
        if gates == "torch":
            start_gates_as_torch(model)
        return model


def start_as_torch(model: nn.Module) -> None:
    """Weights of linear maps as torch starts them, uniform up to 1 / sqrt(inputs), unless they start at zero. Biases
    stay as they are, and so do gates, decays, temperatures and conditioners of free energy mixers.

    So does the original in its language models; its autoencoder starts them N(0, 0.02), as femixer does everywhere.
    """
    mixers = [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]
    own = {linear for mixer in mixers for linear in mixer.modules()}
    others = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m not in own]
    for weight in [*others, *(map_ for mixer in mixers for map_ in mixer.attention_maps())]:
        if weight.is_meta or bool(weight.any()):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def start_gates_as_torch(model: nn.Module) -> None:
    """What `start_as_torch` leaves alone, as torch starts it; temperatures and biases stay."""
    for mixer in (module for module in model.modules() if isinstance(module, FreeEnergyMixer)):
        kept = [(map_, map_.clone()) for map_ in mixer.attention_maps()]
        for linear in (module for module in mixer.modules() if isinstance(module, nn.Linear)):
            nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
        for map_, before in kept:
            map_.copy_(before)
