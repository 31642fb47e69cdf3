"""`femixer inspect --summary`: what the read does in a trained model, as one figure and one table.

usage.png   histograms of lambda, hidden temperature and KL by layer
usage.md    channels that leave the prior, and the loss without each part; it is written last
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from femixer.inspection.model import inspect_model
from femixer.inspection.usage import LEAVES, PARTS, LayerUsage, draw, layers_usage, loss, parts_of, without
from femixer.options import check
from femixer.reporting import Row, Table, as_markdown
from femixer.reporting.figures import save
from femixer.training import atomic

FIGURE, TABLE = "usage.png", "usage.md"
LENGTH = 512
"""Tokens that are read at a time where the model does not say how many it was trained on."""


def summarize(model: Any, ids: Sequence[int], inspected: int, out: Path) -> Path:
    """Write the figure and the table; the first `inspected` tokens are looked at, the loss is that of all."""
    check(len(ids) > 1, "text", f"{len(ids)} tokens", "at least two tokens")
    writes = getattr(model, "lm_head", None) is not None and getattr(model.config, "causal", True)
    check(
        writes, "checkpoint", type(model).__name__, "a model that predicts next tokens, whose loss --summary compares"
    )
    usages: list[LayerUsage] = []
    given = torch.tensor([[*ids[:inspected]]], device=model.device)
    for usage in layers_usage(inspect_model(model, given, use_cache=False)):
        print(f"{usage.name}: {usage.leaving:.0%} of the channels leave the prior", file=sys.stderr)
        usages.append(usage)
    length = getattr(model.config, "max_position_embeddings", None) or LENGTH
    losses = {"": loss(model, ids, length)}
    for part in parts_of(model):
        with without(model, part):
            losses[part] = loss(model, ids, length)
        print(f"without {part}: {losses[part]:.4f}", file=sys.stderr)
    with atomic.replacing_files(out) as new:
        save(draw(usages), new / FIGURE)
        atomic.write(new / TABLE, as_markdown(by_layer(usages, len(given[0])), by_part(losses, len(ids) - 1)))
    return out / TABLE


def by_layer(usages: Sequence[LayerUsage], tokens: int) -> Table:
    rows: list[Row] = [
        [
            usage.name,
            usage.parts or "none",
            f"{float(usage.lam.mean()):.3f}",
            f"{float(usage.temperature.mean()):.3f}",
            f"{float(usage.kl.mean()):.4f}",
            f"{float(usage.kl_of_channels.max()):.3f}",
            f"{100 * usage.leaving:.0f}",
        ]
        for usage in usages
    ]
    columns = ("layer", "parts", "lambda", "hidden beta / beta_max", "KL (nats)", "largest of a channel", "leaving (%)")
    note = f"Means over {tokens} tokens, heads and channels. A channel leaves its prior with a mean KL above {LEAVES}."
    return Table.of(columns, rows, "", note)


def by_part(losses: dict[str, float], tokens: int) -> Table:
    rows: list[Row] = [
        [f"without {part}: {PARTS[part]}" if part else "the model", f"{value:.4f}", f"{value - losses['']:+.4f}"]
        for part, value in losses.items()
    ]
    note = f"Nats per token over {tokens} tokens; parts are switched off after training, so nothing could adapt."
    return Table.of(("read", "loss", "change"), rows, "", note)
