"""`femixer inspect`: what a trained model reads in a text, as figures, a table and a page to look around in.

inspect.html   everything, for a browser; needs nothing else
figures/       per layer and head: prior, posteriors, gates and temperatures
summary.md     means per layer; it is written last

With --summary, what the read does in it, as one figure and one table:

usage.png      histograms of lambda, hidden temperature and KL by layer
usage.md       channels that leave the prior, and the loss without each part; it is written last

A channel leaves the prior if its mean KL(posterior at the hidden temperature || prior) is above LEAVES. Without L every
mixer reads the mean (lambda = 0), without G the outer gate is 1, without C the conditioner modulates nothing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.inspection.inspection import Layer, inspect_model, mixers_of
from femixer.inspection.page import MEANS, channels_by_kl, check_size, means, write_page
from femixer.options import Count, Rule, Whole, check, check_all, model_first, parse, positional
from femixer.reporting import Column, Row, Table, as_markdown
from femixer.reporting.figures import BLUE, GREY, figure, quiet, save
from femixer.tasks.lm.data.tokenizer import labels
from femixer.tasks.lm.model import Placement, check_positions, load
from femixer.training import atomic
from femixer.training.journal import counting
from femixer.training.results import check_no_run, model_folder, name_of

FIGURE, TABLE = "usage.png", "usage.md"
LENGTH = 512
"""Tokens that are read at a time where the model does not say how many it was trained on."""


COLUMNS = [Column(t) for t in ("layer", "prior", "parts", *MEANS.values(), "largest mean KL of a channel")]


def table_row(number: int, layer: Layer) -> Row:
    """A row of summary.md: means over tokens, heads and channels, and the channel with the largest KL."""
    if layer.inspection is None:
        return [str(number), layer.prior, "", *[""] * len(MEANS), layer.missing]
    found = means(layer)
    numbers = [f"{sum(found[name]) / len(found[name]):.3f}" for name in MEANS]
    kl, head, channel = max((kl, h, d) for h, row in enumerate(found["kl_channels"]) for d, kl in enumerate(row))
    largest = f"{kl:.3f} (head {head}, channel {channel})" if kl >= 5e-4 else "none"
    return [str(number), layer.prior, layer.parts or "none", *numbers, largest]


LEAVES = 0.01
"""Nats, on average over the tokens: a channel that leaves its prior by less reads the mean for all one can see."""
PARTS = {"L": "every mixer reads the mean", "G": "the outer gate is 1", "C": "no conditioner"}


class LayerUsage(NamedTuple):
    """Of one layer: lambda, hidden temperature relative to beta_max and KL, of every token, head and channel [N]; the
    mean KL of each channel [H D]."""

    name: str
    parts: str
    lam: Tensor
    temperature: Tensor
    kl: Tensor
    kl_of_channels: Tensor

    @property
    def leaving(self) -> float:
        """The share of channels that leave the prior."""
        return float((self.kl_of_channels > LEAVES).double().mean())


def layers_usage(layers: Iterable[Layer]) -> Iterator[LayerUsage]:
    """Of the layers that can be inspected, one after the other."""
    for layer in layers:
        r = layer.inspection
        if r is None or layer.beta_max is None:
            continue
        beta = layer.beta_max.double()[:, None].clamp_min(1e-12)
        yield LayerUsage(
            layer.name,
            layer.parts,
            r.lam.double().flatten(),
            (r.hidden_beta.double().cpu() / beta).flatten(),
            r.kl.double().flatten(),
            r.kl.double().mean((0, 2)).flatten(),
        )


@contextmanager
def without(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, no mixer of the model uses this part: L, G or C."""
    check(part in PARTS, "part", part, f"one of {', '.join(PARTS)}", "is unknown")
    mixers: list[Any] = [m for m in mixers_of(model).values() if part in getattr(m, "parts", "")]
    name = "_beta" if part == "L" else "_columns"

    def changed(own: Any) -> Any:
        if part == "L":
            return lambda: None
        if part == "C":
            return lambda x, features, context: own(x, None, context)
        return lambda *given: own(*given)._replace(gate=None)

    for mixer in mixers:
        setattr(mixer, name, changed(getattr(mixer, name)))
    try:
        yield
    finally:
        for mixer in mixers:
            delattr(mixer, name)


def parts_of(model: nn.Module) -> list[str]:
    """The parts that can be switched off in some mixer of the model."""
    used = {part for mixer in mixers_of(model).values() for part in getattr(mixer, "parts", "")}
    return [part for part in PARTS if part in used]


@torch.no_grad()
def loss(model: Any, tokens: Sequence[int], length: int) -> float:
    """Mean cross entropy in nats per token of a text, read in stretches of `length` tokens."""
    total, count = 0.0, 0
    with counting(len(tokens) - 1, "tokens of the text") as told:
        for start in range(0, len(tokens) - 1, length):
            ids = torch.tensor([tokens[start : start + length + 1]], device=model.device)
            logits = model(ids[:, :-1], use_cache=False).logits.double()
            total += float(nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
            told(ids.shape[1] - 1)
    return total / count


def draw(usages: Sequence[LayerUsage]) -> Any:
    """Histograms by layer: lambda, hidden temperature, KL, and the mean KL of the channels, sorted."""
    drawing = figure(11, 1.0 + 1.5 * len(usages))
    panels = drawing.subplots(len(usages), 4, squeeze=False)
    titles = ("lambda", "hidden temperature / beta_max", "KL(posterior || prior), nats", "mean KL by channel, sorted")
    widest = max([LEAVES * 2, *(float(usage.kl.max()) for usage in usages)])
    for row, usage in zip(panels, usages, strict=True):
        drawn = ((usage.lam, 1.0), (usage.temperature, 1.0), (usage.kl, widest))
        for axes, (numbers, edge) in zip(row, drawn, strict=False):
            axes.hist(numbers.clamp(0, edge).numpy(), bins=40, range=(0, edge), color=BLUE, log=True)
        row[3].plot(usage.kl_of_channels.sort(descending=True).values.numpy(), color=BLUE)
        row[3].axhline(LEAVES, color=GREY, linestyle=":")
        row[3].set_yscale("symlog", linthresh=LEAVES)
        row[3].set_ylim(bottom=0)
        row[0].set_ylabel(f"{usage.name}\n{usage.leaving:.0%} of channels leave", fontsize=7)
        for axes in row:
            quiet(axes)
            axes.tick_params(labelsize=7)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return drawing


def summarize(model: Any, ids: Sequence[int], inspected: int, out: Path) -> Path:
    """Write the figure and the table; the first `inspected` tokens are looked at, the loss is that of all."""
    check(len(ids) > 1, "text", f"{len(ids)} tokens", "at least two tokens")
    writes = getattr(model, "lm_head", None) is not None and getattr(model.config, "causal", True)
    check(
        writes, "checkpoint", type(model).__name__, "a model that predicts next tokens, whose loss --summary compares"
    )
    usages: list[LayerUsage] = []
    given = torch.tensor([ids[:inspected]], device=model.device)
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
    rows: list[Row] = []
    for usage in usages:
        means = [f"{usage.lam.mean():.3f}", f"{usage.temperature.mean():.3f}", f"{usage.kl.mean():.4f}"]
        channels = [f"{usage.kl_of_channels.max():.3f}", f"{100 * usage.leaving:.0f}"]
        rows.append([usage.name, usage.parts or "none", *means, *channels])
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


PAGE, FIGURES, SUMMARY = "inspect.html", "figures", "summary.md"
DRAWN_CHANNELS = 4


@dataclass(frozen=True)
class Command:
    """Show what a trained model reads in a text: a page for the browser, figures and a table.

    Per layer and head: where the prior looks, where channels look instead, lambda, gate, hidden temperature and KL.
    """

    checkpoint: Annotated[Path, positional()]
    """Model folder, or results folder of `femixer lm train`."""
    placement: Placement
    text: str | None = None
    """Text to read; without it --file or standard input is read."""
    file: Path | None = None
    """File with the text to read; - is standard input."""
    out: Path = Path("results/inspect")
    """Results folder; what an earlier inspection left there is replaced."""
    max_tokens: Count = 128
    """Tokens of the text to read, from its beginning; page size and memory grow with their square."""
    layers: tuple[Whole, ...] | None = None
    """Layers to show, from 0; by default all."""
    heads: tuple[Whole, ...] | None = None
    """Heads to draw as figures; by default, in each layer, the one with the largest mean KL. The page has all."""
    channels: tuple[Whole, ...] | None = None
    """Channels to draw as figures, by default those with the largest mean KL.
    The page stores these alone where the prior differs per channel (aft, decay, ssm, mamba)."""
    query: int | None = None
    """Token, from 0, whose channels are compared; by default the one with the largest KL."""
    summary: bool = False
    """Only sum up what the read does;
    usage.png: histograms of lambda, hidden temperature and KL by layer; usage.md: the loss without each part."""

    def validate(self) -> None:
        if self.summary:
            none = Rule("None with --summary, which sums up all of them", lambda given: False)
            check_all(self, none, "layers", "heads", "channels", "query")
        for name in ("layers", "heads", "channels"):
            check(getattr(self, name) != (), name, (), "some numbers, or leave it out")
        check_no_run(self.out)


def main(args: Sequence[str]) -> int:
    command = parse(Command, model_first(args), "inspect")
    command.validate()
    model_folder(command.checkpoint)  # says what is wrong before anything slow
    text = given_text(command.text, command.file)
    model, tokenizer = load(command.checkpoint, command.placement, writes=False)
    if command.summary:
        print(summarize(model, tokenizer(text)["input_ids"], command.max_tokens, command.out).read_text("utf-8"))
        print(f"The figure is {command.out / FIGURE}")
        return 0
    size = run(command, model, tokenizer, text)
    print((command.out / SUMMARY).read_text(encoding="utf-8"))
    print(f"Open {command.out / PAGE} ({size / 1e6:.1f} MB) in a browser; figures are in {command.out / FIGURES}/")
    return 0


def given_text(text: str | None, file: Path | None) -> str:
    """The text itself, that of a file, or that of standard input (-)."""
    check(text is None or file is None, "text", text, "either --text or --file")
    if text is not None:
        return text
    if file is not None and str(file) != "-":
        return file.read_text(encoding="utf-8", errors="replace")
    typed = file is None and sys.stdin.isatty()
    check(not typed, "text", None, "a --text, a --file or text on standard input")
    return sys.stdin.read()


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
    rows: list[Row] = []
    name = name_of(command.checkpoint)
    shown: dict[str, Any] = {
        "model": name,
        "text": text,
        "note": note,
        "query": command.query,
        "channels": command.channels,
    }
    with (
        atomic.replacing_files(command.out, SUMMARY, f"{FIGURES}/layer-*-head-*.png") as new,
        counting(len(chosen), "layers") as told,
    ):
        (new / FIGURES).mkdir()
        drawn = _drawn(command, new / FIGURES, layers, tokens, rows, told)
        size = write_page(new / PAGE, drawn, tokens, **shown)
        about = f"What {name} reads in {len(tokens)} tokens: means over tokens, heads and channels."
        atomic.write(new / SUMMARY, as_markdown(Table.of(COLUMNS, rows, about)))
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


def _drawn(
    command: Command,
    figures: Path,
    layers: Iterable[Layer],
    tokens: list[str],
    rows: list[Row],
    told: Callable[[int], None],
) -> Iterator[Layer]:
    """The layers as they come, each drawn and added to the table on its way."""
    for number, layer in enumerate(layers):
        if command.layers is None or number in command.layers:
            rows.append(table_row(number, layer))
        if (r := layer.inspection) is not None:
            per_head = r.kl[0].double().sum(-1)  # [H, T]
            best = channels_by_kl(layer, DRAWN_CHANNELS)
            for head in command.heads or [int(per_head.sum(-1).argmax())]:
                row = int(per_head[head].argmax()) if command.query is None else command.query
                picked = list(command.channels or sorted(best[head]))
                path = figures / f"layer-{number:02d}-head-{head:02d}.png"
                r.plot(path, head=head, row=row, channels=picked, tokens=tokens)
            told(1)
        yield layer
