"""TRL's SFTTrainer, as its users run it: packed documents are learned from as if each were alone."""

from pathlib import Path

import datasets
import pytest
import torch
from small_models import stirred, text, word_tokenizer

trl = pytest.importorskip("trl", reason="pip install trl")
LENGTHS = (5, 2, 9, 3, 7, 4)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize(("prior", "rows"), [("softmax", 2), ("gla", 1)])
def test_the_loss_of_packed_documents_is_that_of_each_alone(prior, rows, tmp_path: Path):
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(2, 31, (n,), generator=generator).tolist() for n in LENGTHS]
    model = stirred(text(prior=prior, pad_token_id=0, eos_token_id=1))
    with torch.no_grad():
        alone = [model(torch.tensor([d]), labels=torch.tensor([d])).loss.item() for d in documents]
    arguments = trl.SFTConfig(
        str(tmp_path),
        packing=True,
        max_length=16,
        max_steps=1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2 // rows,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    data = datasets.Dataset.from_dict({"input_ids": documents})
    trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=word_tokenizer())
    packed = trainer.train_dataset["seq_lengths"]
    assert len(packed) == 2 and sum(map(sum, packed)) == sum(LENGTHS)
    trainer.train()
    found = trainer.state.log_history[0]["loss"]
    scored = [n - 1 for n in LENGTHS]
    expected = sum(loss * n for loss, n in zip(alone, scored, strict=True)) / sum(scored)
    assert found == pytest.approx(expected, abs=1e-4)
