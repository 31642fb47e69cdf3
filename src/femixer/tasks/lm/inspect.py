"""`femixer inspect`: what a trained model reads in a text, as figures, a table and a page to look around in.

inspect.html   everything, for a browser; needs nothing else
figures/       per layer and head: prior, posteriors, gates and temperatures
summary.md     means per layer; it is written last

With --summary, what the read does in it, as one figure and one table:

usage.png      histograms of lambda, hidden temperature and KL by layer
usage.md       channels that leave the prior, and the loss without each part; it is written last
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from femixer.inspection.inspection import Layer, inspect_model, mixers_of
from femixer.inspection.page import check_size, write_page
from femixer.inspection.usage import (
    HEADING,
    LEAVES,
    PARTS,
    LayerUsage,
    channels_by_kl,
    draw,
    layers_usage,
    loss,
    parts_of,
    table_row,
    without,
)
from femixer.optional import require
from femixer.options import check, check_positive, model_first, parse
from femixer.reporting import Row, Table, as_markdown
from femixer.reporting.figures import save
from femixer.tasks.lm.checkpoint import Placement, check_positions, given_text, load
from femixer.tasks.lm.data.tokenizer import labels
from femixer.training import atomic
from femixer.training.results import check_no_run, model_folder, name_of

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


tyro = require("tyro", "cli")

PAGE, FIGURES, SUMMARY = "inspect.html", "figures", "summary.md"
DRAWN_CHANNELS = 4


@dataclass(frozen=True)
class Command:
    """Show what a trained model reads in a text: a page for the browser, figures and a table.

    Per layer and head: where the prior looks, where channels look instead, lambda, gate, hidden temperature and KL.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Model folder, or results folder of `femixer lm train`."""
    placement: Placement
    text: str | None = None
    """Text to read; without it --file or standard input is read."""
    file: Path | None = None
    """File with the text to read; - is standard input."""
    out: Path = Path("results/inspect")
    """Results folder; what an earlier inspection left there is replaced."""
    max_tokens: int = 128
    """Tokens of the text to read, from its beginning; page size and memory grow with their square."""
    layers: tuple[int, ...] | None = None
    """Layers to show, from 0; by default all."""
    heads: tuple[int, ...] | None = None
    """Heads to draw as figures; by default, in each layer, the one with the largest mean KL. The page has all."""
    channels: tuple[int, ...] | None = None
    """Channels to draw as figures, and to store in the page where the prior differs per channel (aft, decay, ssm,
    mamba); by default those with the largest mean KL."""
    query: int | None = None
    """Token, from 0, whose channels are compared; by default the one with the largest KL."""
    summary: bool = False
    """Only sum up what the read does: histograms of lambda, hidden temperature and KL by layer (usage.png), and the
    loss of the text without each part (usage.md)."""

    def validate(self) -> None:
        check_positive(max_tokens=self.max_tokens)
        for name in ("layers", "heads", "channels", "query") if self.summary else ():
            value = getattr(self, name)
            check(value is None, name, value, "None with --summary, which sums up all of them")
        for name in ("layers", "heads", "channels"):
            chosen = getattr(self, name)
            check(chosen is None or (len(chosen) > 0 and min(chosen) >= 0), name, chosen, "numbers of at least 0")
        check_no_run(self.out)


def main(args: Sequence[str]) -> int:
    command = parse(Command, model_first(args), "inspect")
    command.validate()
    model_folder(command.checkpoint)  # says what is wrong before anything slow
    text = given_text(command.text, command.file, "text", "file", errors="replace")
    model, tokenizer = load(command.checkpoint, command.placement, writes=False)
    if command.summary:
        print(summarize(model, tokenizer(text)["input_ids"], command.max_tokens, command.out).read_text("utf-8"))
        print(f"The figure is {command.out / FIGURE}")
        return 0
    size = run(command, model, tokenizer, text)
    print((command.out / SUMMARY).read_text(encoding="utf-8"))
    print(f"Open {command.out / PAGE} ({size / 1e6:.1f} MB) in a browser; figures are in {command.out / FIGURES}/")
    return 0


def run(command: Command, model: Any, tokenizer: Any, text: str) -> int:
    """Write the results folder; returns the size of the page in bytes."""
    ids = tokenizer(text)["input_ids"]
    check(len(ids) > 0, "text", text, "some text")
    note = ""
    if len(ids) > command.max_tokens:
        note = f"The first {command.max_tokens} of {len(ids)} tokens are shown."
        print(f"warning: {note} --max-tokens shows more", file=sys.stderr)
        ids = ids[: command.max_tokens]
        text = tokenizer.decode(ids)
    check(command.query is None or -len(ids) <= command.query < len(ids), "query", command.query, f"below {len(ids)}")
    check_positions(model, len(ids), "max_tokens", command.max_tokens)
    tokens = labels(tokenizer, ids)
    chosen = _chosen(command, model)
    check_size([[*mixers_of(model).values()][number] for number in chosen], len(ids))
    layers = inspect_model(model, torch.tensor([ids], device=model.device), only=command.layers, use_cache=False)
    rows: list[str] = []
    name = name_of(command.checkpoint)
    with atomic.replacing_files(command.out, SUMMARY, f"{FIGURES}/layer-*-head-*.png") as new:
        (new / FIGURES).mkdir()
        size = write_page(
            new / PAGE,
            _drawn(command, new / FIGURES, _progress(layers, len(chosen)), tokens, rows),
            tokens,
            model=name,
            text=text,
            note=note,
            query=command.query,
            channels=command.channels,
        )
        about = f"What {name} reads in {len(tokens)} tokens: means over tokens, heads and channels.\n\n"
        atomic.write(new / SUMMARY, about + HEADING + "".join(rows))
    return size


def _chosen(command: Command, model: Any) -> list[int]:
    """Numbers of the layers to inspect, after checking what was chosen of the model."""
    mixers: list[Any] = [*mixers_of(model).values()]
    wanted = range(len(mixers)) if command.layers is None else command.layers
    check(max(wanted) < len(mixers), "layers", wanted, f"numbers below {len(mixers)}")
    chosen = [number for number in wanted if hasattr(mixers[number], "inspect")]
    check(len(chosen) > 0, "layers", wanted, "at least one that is no baseline")
    for name, axis in (("heads", 0), ("channels", 1)):
        size, given = min(mixers[number].beta_max.shape[axis] for number in chosen), getattr(command, name)
        check(given is None or max(given) < size, name, given, f"numbers below {size}")
    return chosen


def _progress(layers: Iterator[Layer], count: int) -> Iterator[Layer]:
    """The layers, which are computed as they are taken: each is told before it is there, with the time left."""
    done, began, left = 0, time.monotonic(), ""
    print(f"layer 1 of {count}", file=sys.stderr, flush=True)
    for layer in layers:
        yield layer
        if layer.inspection is not None:
            done += 1
            left = f", {(time.monotonic() - began) / done * (count - done):.0f} s left"
            if done < count:
                print(f"layer {done + 1} of {count}{left}", file=sys.stderr, flush=True)


def _drawn(
    command: Command, figures: Path, layers: Iterator[Layer], tokens: list[str], rows: list[str]
) -> Iterator[Layer]:
    """The layers as they come, each drawn and added to the table on its way."""
    for number, layer in enumerate(layers):
        if command.layers is None or number in command.layers:
            rows.append(table_row(number, layer))
        r = layer.inspection
        if r is not None:
            per_head = r.kl[0].double().sum(-1)  # [H, T]
            best = channels_by_kl(layer, DRAWN_CHANNELS)
            for head in command.heads or [int(per_head.sum(-1).argmax())]:
                row = int(per_head[head].argmax()) if command.query is None else command.query
                picked = list(command.channels or sorted(best[head]))
                path = figures / f"layer-{number:02d}-head-{head:02d}.png"
                r.plot(path, head=head, row=row, channels=picked, tokens=tokens)
        yield layer
