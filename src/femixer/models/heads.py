"""Heads over the text model: classes of a sequence, classes of its tokens, and masked tokens (BERT-style)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from femixer.models.config import FEMConfig
from femixer.models.language import FEMModel, FEMPreTrainedModel, padding_mask
from femixer.models.packing import taken_for_loss


class _WithHead(FEMPreTrainedModel):
    """A body whose head may be new: only that may be missing in a folder of weights (see femixer.models.loading)."""

    new_head: tuple[str, ...] = ("score",)
    output: Any
    packs = True  # a row may hold several documents
    for_loss: tuple[str, ...] = ("num_items_in_batch",)  # what the loss reads of the arguments

    def __init__(self, config: FEMConfig) -> None:
        super().__init__(config)
        self.model = FEMModel(config)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """labels, with which there is a loss: as the class says. The rest is as in FEMModel."""
        if not self.packs and kwargs.get("segments") is not None:
            raise ValueError("segments is not allowed: a row is one sequence, which has one class")
        for_loss = taken_for_loss(kwargs, self.for_loss)
        # A head reads whole sequences, so nothing is kept of them.
        if kwargs.pop("use_cache", None):
            raise ValueError(f"use_cache=True is not allowed; {type(self).__name__} reads whole sequences")
        if input_ids is not None and input_ids.shape[1] and attention_mask is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs = self.model(**given, use_cache=False, **kwargs)
        logits = self.logits(outputs.last_hidden_state, input_ids, attention_mask)
        loss = None if labels is None else self.loss(logits, labels, for_loss)
        return self.output(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """hidden [B, T, hidden_size] -> logits of what the labels are."""
        raise TypeError(f"{type(self).__name__} must define logits()")

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(logits=logits, labels=labels, config=self.config, **for_loss)


class _Classifier(_WithHead):
    def __init__(self, config: FEMConfig) -> None:
        super().__init__(config)
        classes = config.num_labels
        assert classes is not None  # transformers fills it in
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size, classes)
        self.post_init()


class FEMForSequenceClassification(_Classifier):
    """FEMModel with logits of a sequence's classes: at its last token if causal, from the mean of all if not.

    attention_mask [B, T]: 0 is padding, anywhere; without it a causal model reads the class at the last token that is
    not config.pad_token_id. labels: a class per sequence [B], or numbers [B] or [B, num_labels]; the loss is that of
    config.problem_type, which follows from the labels if it is None.
    """

    output = SequenceClassifierOutput
    accepts_loss_kwargs = False  # the loss is a mean over sequences: Trainer divides it by the steps it accumulates
    packs, for_loss = False, ()

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        real, padding = attention_mask, self.config.pad_token_id
        if real is None and self.config.causal and input_ids is not None and padding is not None:
            real = input_ids != padding
        return self.score(self.dropout(self.pooled(hidden, real)))

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config)

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[B, T, hidden_size] -> [B, hidden_size]: of the last real token, or the mean of the real ones."""
        if not hidden.shape[1]:
            raise ValueError("input_ids has no tokens; allowed is at least one")
        mask = padding_mask(attention_mask, hidden)
        if mask is None:
            return hidden[:, -1] if self.config.causal else hidden.mean(1)
        if self.config.causal:
            place = torch.arange(hidden.shape[1], device=hidden.device).masked_fill(~mask, 0).amax(1)
            return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        total = hidden.masked_fill(~mask[..., None], 0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp_min(1)


class FEMForTokenClassification(_Classifier):
    """FEMModel with logits of every token's classes [B, T, num_labels].

    labels [B, T]: -100 where nothing is to be learned.
    """

    output = TokenClassifierOutput

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        return self.score(self.dropout(hidden))


class FEMForMaskedLM(_WithHead):
    """FEMModel as encoder with logits of the tokens that were masked.

    labels [B, T]: the tokens that were masked, -100 at all others.
    """

    output = MaskedLMOutput
    new_head = ("lm_head",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FEMConfig) -> None:
        if config.causal:
            raise ValueError(
                "causal=True is not allowed in FEMForMaskedLM; choose False: it reads both sides of a mask"
            )
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, hidden: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        return self.lm_head(hidden)

    def loss(self, logits: Tensor, labels: Tensor, for_loss: dict[str, Any]) -> Any:
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)
