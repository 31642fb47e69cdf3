"""Language models over several ranks: sequences that are cut (`femixer.parallel`), heads by transformers' own plan.

Sequences: every rank of a cut is called with the same whole batch: tokens are small, and with all of them a rank knows
paddings, documents and labels beyond its own. It computes hidden states and logits of its own tokens only; the loss is
that of all.

Heads, from_pretrained(..., tp_plan="auto"): transformers makes a model, says which ranks divide which module, and fills
in the weights. A mixer's projections hold several names side by side, which no placement of a tensor can cut, so it is
loaded whole and divided afterwards.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from femixer.layout import Past
from femixer.mixer import FreeEnergyMixer
from femixer.models.config import HEADS_STYLE
from femixer.models.language import PACKING, FEMForCausalLM, FEMModel, packed_segments, padding_mask, within_documents
from femixer.parallel.cut import Cut, summed
from femixer.parallel.heads import cut_heads, swapped


def cut_model(model: Any, cut: Cut) -> None:
    body = model if isinstance(model, FEMModel) else model.model
    swapped(body, CutModel).cut = cut
    if body is not model:
        swapped(model, CutLanguageModel).cut = cut


def _refuse(options: dict[str, Any]) -> None:
    """What makes no sense for a part of a sequence."""
    for name in ("past_key_values", "use_cache", "logits_to_keep"):
        value = options.get(name)
        if value is not None and not (isinstance(value, int) and value == 0 and name != "past_key_values"):
            raise ValueError(f"{name} does not fit a sequence that is cut over ranks; leave it out")


class CutModel(FEMModel):
    """input_ids [B, T] -> hidden states [B, T / ranks, hidden_size] of this rank's tokens."""

    cut: Cut

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        _refuse(options)
        x = input_ids if inputs_embeds is None else inputs_embeds
        if x is None:
            raise ValueError("give either input_ids or inputs_embeds")
        self.cut.check_length(x.shape[1])
        mask = padding_mask(attention_mask, x)
        segments = packed_segments(x, segments, mask, options, Past())
        if mask is not None and segments is None:  # as segments, which all ranks have, also one without padding
            segments = mask.long() - 1
        options = {name: value for name, value in options.items() if name not in PACKING}
        return super().forward(
            input_ids=None if input_ids is None else self.cut.take(input_ids),
            segments=None if segments is None else self.cut.take(segments),
            inputs_embeds=None if inputs_embeds is None else self.cut.take(inputs_embeds),
            **{**options, "use_cache": False},
        )


class CutLanguageModel(FEMForCausalLM):
    """Logits [B, T / ranks, vocabulary] of this rank's tokens, and the loss of all."""

    cut: Cut

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        _refuse(options)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "segments": segments, "labels": labels}
        if labels is None:
            return super().forward(**given, **options)
        after = options.pop("shift_labels", None)
        if after is None:
            x = input_ids if input_ids is not None else options["inputs_embeds"]
            documents = packed_segments(x, segments, padding_mask(attention_mask, x), options, Past())
            within = labels if documents is None else within_documents(labels, documents)
            after = F.pad(within, (0, 1), value=-100)[:, 1:]
        count = options.pop("num_items_in_batch", None)
        count = (after != -100).sum() if count is None else count
        wanted = options.pop("return_dict", None)
        out = super().forward(**given, shift_labels=self.cut.take(after), num_items_in_batch=count, **options)
        out.loss = summed(out.loss, self.cut.group)
        return out.to_tuple() if wanted is False else out


class HeadsOverRanks(TensorParallelLayer):
    """The style of a mixer in a plan: it notes the ranks."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.heads_over = mesh
        return module


def register_heads() -> None:
    styles: Any = ALL_PARALLEL_STYLES  # whose annotations say functions, and whose entries are styles
    styles.register(HEADS_STYLE, HeadsOverRanks())


def divide_mixers(model: nn.Module) -> None:
    """Divide the mixers that a plan named; rivals, and what is divided already (FSDP), stay as they are."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        mesh = module.__dict__.pop("heads_over", None)
        if mesh is None or not isinstance(module, FreeEnergyMixer):
            continue
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            cut_heads(module, mesh, known)
