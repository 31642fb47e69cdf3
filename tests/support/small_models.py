"""Small models of text and of images, tokenizers for them, and folders that commands read."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from femixer.models import FEMConfig, FEMForCausalLM, FEMForImageClassification, FEMVisionConfig
from femixer.tasks.lm.data.tokenizer import byte_tokenizer

WORDS = 31
"""Of the vocabulary."""
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
# Wide initial weights, so that a model of bytes that was never trained prefers some of them clearly.
BYTES = {"vocab_size": 257, "hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 28}
BYTES |= {"max_position_embeddings": 61, "initializer_range": 0.4}


def text(**fields: Any) -> FEMForCausalLM:
    torch.manual_seed(0)
    return FEMForCausalLM(FEMConfig(**{"vocab_size": WORDS, **SIZES, **fields})).eval()


def of_bytes(seed: int = 0, **fields: Any) -> FEMForCausalLM:
    """For `byte_tokenizer`."""
    torch.manual_seed(seed)
    return FEMForCausalLM(FEMConfig(**{**SIZES, **BYTES, **fields})).eval()


def images(**fields: Any) -> FEMForImageClassification:
    torch.manual_seed(0)
    sizes = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    return FEMForImageClassification(FEMVisionConfig(**{**sizes, **fields})).eval()


def stirred(model: Any) -> Any:
    """The model with all parameters away from their starting values, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """None of them is 0, which models take for padding."""
    return torch.randint(1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Of "w0", which is padding, "w1", which ends a text, "w2", ..."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "pad_token": "w0", "eos_token": "w1", "mask_token": f"w{WORDS - 1}"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def trainer(model: Any, rows: Any, folder: Path, **options: Any) -> Trainer:
    """transformers' own, silent; options: of TrainingArguments, or a data_collator."""
    given = {"report_to": "none", "use_cpu": True, "seed": 0, "disable_tqdm": True, "logging_steps": 1}
    collator = options.pop("data_collator", None)
    arguments = TrainingArguments(str(folder), **{**given, **options})
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)


def saved(model: Any, folder: Path) -> Path:
    """The folder of a model, with the tokenizer of bytes beside it."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
