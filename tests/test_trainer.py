"""transformers' Trainer, as its users run it: train, evaluate, predict, resume, accumulate and recompute."""

import numpy as np
import pytest
import small_models
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from femixer.surgery import upgrade


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def made(kind: str) -> tuple[torch.nn.Module, Rows]:
    """A model with this prior, or one of images, and what it learns from."""
    if kind != "images":
        model = small_models.text(prior=kind)
        return model, Rows([{"input_ids": row, "labels": row} for row in small_models.tokens(12, 11)])
    model, given = small_models.images(), torch.randn(12, 1, 8, 8)
    return model, Rows([{"pixel_values": p, "labels": torch.tensor(i % 3)} for i, p in enumerate(given)])


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("kind", ["softmax", "gla", "mamba", "images"])
def test_it_trains_evaluates_and_predicts(kind, tmp_path):
    model, rows = made(kind)
    how = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no"}
    run = small_models.trainer(model, rows, tmp_path, eval_strategy="steps", eval_steps=2, **how)
    assert np.isfinite(run.train().training_loss)
    assert np.isfinite(run.evaluate()["eval_loss"])
    predictions = run.predict(rows).predictions
    with torch.no_grad():
        expected = [model(**{k: v[None] for k, v in row.items()}).logits[0] for row in rows.rows]
    np.testing.assert_allclose(predictions, torch.stack(expected).numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    losses = []
    for stops in ([4], [2, 4]):
        folder = tmp_path / str(len(stops))
        for stop in stops:
            model, rows = made("gla")
            # The same schedule, ended early.
            how = {"max_steps": stop, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
            run = small_models.trainer(model, rows, folder, save_steps=2, **how)
            run.train(resume_from_checkpoint=stop != stops[0])
        losses.append([p.detach().clone() for p in model.parameters()])
    for once, twice in zip(*losses, strict=True):
        torch.testing.assert_close(once, twice, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("kind", ["softmax", "gla", "mamba", "images"])
def test_recomputed_and_accumulated_steps_are_the_plain_ones(kind, tmp_path):
    results = []
    for options in (
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 4, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ):
        model, rows = made(kind)
        small_models.trainer(model, rows, tmp_path, save_strategy="no", max_steps=2, **options).train()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["femixer", "upgraded"])
def test_smoothed_labels_are_those_of_the_next_token(kind, tmp_path):
    model, rows = made("softmax")
    if kind == "upgraded":
        sizes = {"vocab_size": small_models.WORDS, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
        model = upgrade(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3)))
    run = small_models.trainer(model, rows, tmp_path, label_smoothing_factor=0.25, save_strategy="no")
    loss = run.compute_loss(model.eval(), {k: v[None] for k, v in rows[0].items()})
    with torch.no_grad():
        logits = model(input_ids=rows[0]["input_ids"][None]).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, rows[0]["labels"][1:], label_smoothing=0.25)
    torch.testing.assert_close(loss.detach(), expected)
