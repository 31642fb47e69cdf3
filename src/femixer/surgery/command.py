"""`femixer upgrade`: put FEM into a trained transformers model and save it with its tokenizer."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from femixer.damage import check_tensor, reading
from femixer.models.files import Card, only_local, saved_tokenizer, write_card
from femixer.optional import require
from femixer.options import as_typed, check, model_first, parse, positional
from femixer.surgery.attention import PARTS
from femixer.surgery.families import check_ends, check_parts, check_upgradable, load, upgrade
from femixer.training import atomic
from femixer.training.results import model_folder

transformers = require("transformers", "lm")
# The largest change of a logit in float32 that an upgrade may make.
LIMIT = 1e-4
PROBE = (2, 64)


@dataclass(frozen=True)
class Command:
    """Put FEM into a trained transformers model: all weights are kept, and what it computes stays as it was.

    Fine-tune the result as any transformers model; `import femixer.surgery` lets the Auto classes load it.
    """

    model: Annotated[str, positional()]
    """Model folder, or name on the Hugging Face hub. Safetensors only."""
    out: Path
    """Folder for the upgraded model and its tokenizer; it must not exist."""
    parts: str = PARTS[0]
    """LT: free energy and temperature gate; LTG: also the outer gate."""
    rank: int = 16
    """Rank of the maps from hidden states to the gates."""
    seed: int = 0
    """Seed of these maps' initial weights and of the probe."""


def main(args: Sequence[str]) -> int:
    options = parse(Command, model_first(args), "upgrade")
    check(not options.out.exists(), "out", str(options.out), "a folder that does not exist yet")
    check_parts(options.parts)
    if not sys.stderr.isatty():  # a bar drawn into a file is only noise
        transformers.utils.logging.disable_progress_bar()
    source = str(model_folder(Path(options.model))) if Path(options.model).exists() else options.model
    model = load(source).eval()
    check_upgradable(model)
    if model.can_generate():
        check_ends(source, model)
    torch.manual_seed(options.seed)
    inputs = probe(model)
    before, count = outputs(model, inputs, f"what {source} computes"), model.num_parameters()
    upgrade(model, options.parts, options.rank)
    change = (outputs(model, inputs, "what the upgraded model computes") - before).abs().max().item()
    added = model.num_parameters() - count
    card = Card(
        data=f"None besides that of {source}, of which it computes the same.",
        command=as_typed(),
        metrics={"largest change of an output on random input": change},
    )
    save(model, source, options.out, card)
    print(f"{options.out}: {type(model).__name__}, parts {options.parts}, {model.dtype}".replace("torch.", ""))
    print(f"parameters: {count:,} + {added:,} ({100 * added / count:.2f} %)")
    print(f"largest change of an output on random input: {change:.1e} (outputs up to {before.abs().max().item():.1f})")
    if change > LIMIT and model.dtype in (torch.float32, torch.float64):
        print(f"warning: this is more than {LIMIT:.0e}; compare the two models on your data", file=sys.stderr)
    return 0


def probe(model: Any) -> dict[str, Tensor]:
    """Random input of the kind that the model takes."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.randn(PROBE[0], config.num_channels, height, width)
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    # Half of the positions: some models count theirs from behind the padding token.
    length = min(PROBE[1], config.max_position_embeddings // 2)
    return {"input_ids": torch.randint(config.vocab_size, (PROBE[0], length), device=model.device)}


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, Tensor], what: str) -> Tensor:
    """The model's first output, the logits where it has any, as float32 or better."""
    return check_tensor(model(**inputs)[0].to(torch.promote_types(model.dtype, torch.float32)), what)


def save(model: Any, source: str, out: Path, card: Card) -> None:
    """Model, card and tokenizer (or image processor) into the folder `out`, which is there completely or not at all."""
    images, companion = model.main_input_name == "pixel_values", None
    try:
        with reading(source):
            processor = transformers.AutoImageProcessor
            companion = processor.from_pretrained(source, **only_local(source)) if images else saved_tokenizer(source)
    except (OSError, ValueError):
        name = "image processor" if images else "tokenizer"
        print(f"warning: {source} has no {name}; none is saved", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(out) as partial:
        model.save_pretrained(partial)
        write_card(model, partial, card)
        if companion is not None:
            companion.save_pretrained(partial)
