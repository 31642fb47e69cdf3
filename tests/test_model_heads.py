"""Classifiers and masked language models over the text model, causal and encoder, with the real Trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import stirred, tokens, trainer, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from femixer.models import (
    FEMConfig,
    FEMForCausalLM,
    FEMForMaskedLM,
    FEMForSequenceClassification,
    FEMForTokenClassification,
    FEMModel,
)

PRIORS = ("softmax", "linear", "gla", "aft", "decay", "ssm", "mamba", "mamba-interactive")
HEADED = (FEMForSequenceClassification, FEMForTokenClassification, FEMForMaskedLM)


def config(**fields: Any) -> FEMConfig:
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return FEMConfig(**{**sizes, "pad_token_id": 0, "num_labels": 5, **fields})


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_on_either_side_changes_no_logits(prior, causal):
    ids = tokens(2, 7)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
    padded = torch.full((2, 12), 3).masked_scatter(mask.bool(), ids)
    for kind in HEADED[: 2 if causal else 3]:
        model = stirred(kind(config(prior=prior, causal=causal)))
        alone, together = model(ids).logits, model(padded, attention_mask=mask).logits
        if kind is not FEMForSequenceClassification:
            together = together[mask.bool()].view(alone.shape)
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)


def test_a_causal_class_is_read_at_the_last_token_that_is_not_padding_without_a_mask_too():
    model, ids = stirred(FEMForSequenceClassification(config(prior="gla"))), tokens(2, 7)
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], 1)
    padded[0, 7:9] = torch.tensor([4, 9])  # the first row is longer
    alone = torch.cat([model(padded[:1, :9]).logits, model(ids[1:]).logits])
    with torch.no_grad():
        torch.testing.assert_close(model(padded).logits, alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("prior", PRIORS)
def test_an_encoder_reads_the_tokens_after_and_a_causal_model_does_not(prior):
    ids = tokens(1, 9)
    changed = ids.clone()
    changed[0, -1] = 31 - ids[0, -1]
    for causal in (True, False):
        model = stirred(FEMModel(config(prior=prior, causal=causal)))
        difference = (model(ids)[0] - model(changed)[0])[:, :-1].abs().max().item()
        assert difference < 1e-6 if causal else difference > 1e-4


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        (None, torch.tensor([1, 4, 0]), torch.nn.functional.cross_entropy),
        ("multi_label_classification", torch.eye(5)[:3], torch.nn.functional.binary_cross_entropy_with_logits),
        ("regression", torch.arange(15.0).view(3, 5), torch.nn.functional.mse_loss),
    ],
)
def test_the_loss_of_sequences_is_that_of_their_problem(problem, labels, loss):
    model = stirred(FEMForSequenceClassification(config(problem_type=problem)))
    outputs = model(tokens(3, 6), labels=labels)
    torch.testing.assert_close(outputs.loss, loss(outputs.logits, labels))


def test_labels_of_minus_100_are_not_scored():
    ids, labels = tokens(2, 6), torch.full((2, 6), -100)
    labels[0, 2], labels[1, 4] = 3, 1
    for model in (FEMForTokenClassification(config()), FEMForMaskedLM(config(causal=False))):
        outputs = stirred(model)(ids, labels=labels)
        log_p = outputs.logits.log_softmax(-1)
        torch.testing.assert_close(outputs.loss, -(log_p[0, 2, 3] + log_p[1, 4, 1]) / 2)


@pytest.mark.parametrize("causal", [True, False])
def test_a_new_head_over_a_loaded_body_is_named_in_a_warning(causal, tmp_path):
    body = stirred(FEMForCausalLM(config()))
    body.save_pretrained(tmp_path / "text")
    for auto, kind in (
        (AutoModelForSequenceClassification, FEMForSequenceClassification),
        (AutoModelForTokenClassification, FEMForTokenClassification),
    ):
        with pytest.warns(UserWarning, match=r"has no score.bias, score.weight: new.* lm_head.weight of another head"):
            model = auto.from_pretrained(tmp_path / "text", num_labels=3, causal=causal)
        assert type(model) is kind and model.config.causal == causal and model.score.out_features == 3
        for name, weight in body.model.named_parameters():
            assert torch.equal(model.model.get_parameter(name), weight), name
        model.save_pretrained(tmp_path / "classifier")
        loaded = auto.from_pretrained(tmp_path / "classifier")  # without a warning
        assert torch.equal(loaded.score.weight, model.score.weight)
    with pytest.raises(ValueError, match=r"lack lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "classifier", causal=True)
    encoder = AutoModelForMaskedLM.from_pretrained(tmp_path / "text", causal=False)
    assert torch.equal(encoder.lm_head.weight, body.lm_head.weight)


def test_what_is_missing_besides_a_whole_head_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    stirred(FEMForSequenceClassification(config())).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for gone in ("score.bias", "model.norm.weight"):
        kept = {name: weight for name, weight in weights.items() if name != gone}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lack {gone}"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="causal=True is not allowed in FEMForMaskedLM"):
        FEMForMaskedLM(config())
    with pytest.raises(ValueError, match="causal=False is not allowed in FEMForCausalLM"):
        FEMForCausalLM(config(causal=False))
    with pytest.raises(Exception, match="mixer='mamba2' is not allowed; choose one of fem, attention"):
        config(mixer="mamba2", causal=False)
    model = FEMForSequenceClassification(config())
    with pytest.raises(ValueError, match="segments is not allowed"):
        model(tokens(1, 4), segments=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="no tokens"):
        model(tokens(2, 0))
    with pytest.raises(ValueError, match="use_cache=True is not allowed"):
        model(tokens(1, 4), use_cache=True)
    with pytest.raises(TypeError, match="num_items_in_batch"):
        model(tokens(1, 4), num_items_in_batch=torch.tensor(3))
    with pytest.raises(ValueError, match="this model is an encoder"):
        FEMModel(config(causal=False))(tokens(1, 4), use_cache=True)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize(
    ("kind", "causal"),
    # Masked tokens are read from both sides.
    [(kind, causal) for kind in HEADED for causal in (True, False) if not (kind is FEMForMaskedLM and causal)],
)
def test_the_trainer_trains_and_evaluates_and_accumulates(kind, causal, tmp_path: Path):
    """Two small steps' gradients are those of one of twice the size: Trainer scales losses as the models do."""
    rows = []
    for i in range(8):
        ids = tokens(5 + i % 3, seed=i)
        labels: Any = i % 5 if kind is FEMForSequenceClassification else (ids % 5).tolist()
        rows.append({"input_ids": ids.tolist(), "labels": labels})
    of_rows = kind is FEMForSequenceClassification
    collator = (DataCollatorWithPadding if of_rows else DataCollatorForTokenClassification)(word_tokenizer())
    results = []
    for size, steps in ((4, 1), (2, 2)):
        torch.manual_seed(0)
        model = kind(config(causal=causal))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 2}
        run = trainer(model, rows, tmp_path, save_strategy="no", data_collator=collator, **options)
        run.train()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    assert np.isfinite(run.evaluate()["eval_loss"])
