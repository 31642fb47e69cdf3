"""`femixer paper`: every table and figure of the paper, the command that makes it, its cost, and what has been run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from femixer.options import check, parse, positional
from femixer.reporting import Column, Table, show

REPOSITORY = Path(__file__).parents[2]


class Ran(NamedTuple):
    """What was run, and the file of the repository that holds its numbers: without that file it does not count."""

    what: str
    file: str


@dataclass(frozen=True)
class Entry:
    """A table or figure."""

    label: str
    """In the paper's source; none where it has no label."""
    title: str
    commands: tuple[str, ...]
    cost: str
    """Of the commands at the paper's size; estimates are called so."""
    small: tuple[str, ...] = ()
    """What shows the same on two CPU cores."""
    ran: tuple[Ran, ...] = ()
    lacks: str = ""
    """What of the paper's has not been run."""


ENTRIES: dict[str, Entry] = {
    "overview": Entry(
        "two figures",
        "Drawings of the method: they show no measurement",
        ("femixer inspect results/lm --text 'To be, or not to be'",),
        "seconds; draws which channel of a trained model reads which position",
    ),
    "mad": Entry(
        "tab:mem_results_iclr26",
        "MAD: six synthetic tasks, 24 models",
        (
            "femixer mad run --models paper --protocol full --out results/mad-full",
            "femixer mad table --results results/mad-full --select test",
        ),
        "9,504 trainings per seed (24 models x 396), a cluster; --protocol baseline: 864",
        ("femixer mad run --models paper --protocol lite",),
        (
            Ran("lite with an earlier start of the gates, 17 of 24 models, seed 0", "benchmarks/mad-lite.json"),
            Ran("the same, 9 models, seeds 0 and 1", "benchmarks/mad-lite-seeds.json"),
            Ran("small, softmax with seeds 0 and 1, GLA and AFT with seed 0", "benchmarks/mad-small.json"),
            Ran("small, FEM-SM with start=prior, seeds 0 and 1", "benchmarks/mad-small-prior.json"),
            Ran("small, SMAttn+C,G on three tasks, 2 and 3 seeds; AFT+C,G, seed 0", "benchmarks/mad-small-parts.json"),
        ),
        "the protocols baseline and full, and the ladders of GLA and of softmax without C",
    ),
    "language": Entry(
        "tab:unified-leaderboard-merged-onecol",
        "Language models of 340M and 1.3B parameters on 16 tasks",
        (
            "femixer lm reproduce FEM-SM --size 340m --processes 8",
            "femixer lm reproduce FEM-SM --size 1.3b --processes 8",
        ),
        "10 rows of 340M, each about 3e19 FLOPs, and 9 of 1.3B, each 8e20 (estimates: 6 x parameters x tokens)",
        ("femixer lm compare",),
        (
            Ran("11 small models on Tiny Shakespeare, 3 seeds", "docs/experiments.md"),
            Ran("1M parameters on docstrings of packages, up to 3 seeds", "benchmarks/lm-packages.json"),
            Ran("the same on WikiText", "benchmarks/lm-wikitext.json"),
        ),
        "every row at the paper's sizes",
    ),
    "imagenet": Entry(
        "table:imagenet1k-tiny-small",
        "ImageNet-1k with DeiT-Tiny and DeiT-Small",
        (
            "femixer vision run --recipe deit-imagenet --models paper --data imagenet --out results/deit-tiny",
            "femixer vision run --recipe deit-imagenet --models paper --data imagenet --preset deit-small "
            "--out results/deit-small",
            "femixer vision table --results results/deit-tiny results/deit-small",
        ),
        "about 3e18 FLOPs for a Tiny, 1e19 for a Small (estimates: 3 x a forward pass x images x 300 epochs)",
        ("femixer vision run --seeds 5",),
        (Ran("digits of 8 x 8 pixels, 4 models, 5 seeds", "benchmarks/digits.json"),),
        "ImageNet",
    ),
    "forecast": Entry(
        "tab:ts-forecast",
        "Forecasting: six data sets, nine models, four horizons",
        (
            "femixer forecast run --paper data --out results/forecast-paper",
            "femixer forecast table --results results/forecast-paper",
        ),
        "216 trainings; an epoch of FEM-SM on ETTh1 at horizon 96 takes 28 s on two CPU cores, and there are up to 100",
        ("femixer forecast run --data data/ETTh1 --models FEM-SM SMAttn --horizons 96 --epochs 10 --patience 3",),
        (
            Ran("ETTh1 and ETTh2, horizons 96 and 192, 12 models, 2 seeds, 10 epochs", "benchmarks/forecast.json"),
            Ran("the same at horizon 192 with the protocol's own rate", "benchmarks/forecast-slow.json"),
        ),
        "weather, solar, ETTm1, ETTm2, horizons 336 and 720, iTransformer, patience 12",
    ),
    "latency": Entry(
        "tab:speed-latency-throughput-k",
        "Latency and throughput, 8 layers of width 512",
        ("femixer bench speed --table latency --device cuda",),
        "minutes on a GPU (an estimate)",
        ("femixer bench speed --table latency --quick",),
        (Ran("--quick on two CPU cores", "benchmarks/speed-latency.json"),),
        "the paper's size on a GPU",
    ),
    "nodes": Entry(
        "tab:tradeoff-four-nodes",
        "Costs and expressivity of four kinds of mixers",
        ("femixer theory", "femixer bench scaling"),
        "half a minute for counted operations; an hour or two on two CPU cores (an estimate) for measured growth",
        (),
        (Ran("up to 65,536 tokens", "benchmarks/scaling.json"),),
    ),
    "gpt2": Entry(
        "tab:gpt2_latency",
        "Latency, throughput, memory and FLOPs, 12 layers of width 768",
        ("femixer bench speed --table gpt2 --device cuda",),
        "minutes on a GPU (an estimate)",
        ("femixer bench speed --table gpt2 --quick",),
        (Ran("--quick on two CPU cores", "benchmarks/speed-gpt2.json"),),
        "the paper's size on a GPU",
    ),
    "argmax": Entry(
        "fig:toy-argmax",
        "Toy problem: the largest value of each channel",
        ("femixer argmax --paper",),
        "14 to 20 minutes on two CPU cores",
        ("femixer argmax",),
        (
            Ran("to its end, 2000 steps", "benchmarks/argmax-paper.jsonl"),
            Ran("128 channels, 3 seeds, and 700 steps of the paper's width", "docs/argmax.md"),
        ),
    ),
}


@dataclass(frozen=True)
class Paper:
    """Tables and figures of the paper: the commands that make them, their cost, and what has been run."""

    name: Annotated[str | None, positional()] = None
    """One of them, with all of its commands."""


def done(entry: Entry, root: Path = REPOSITORY) -> list[Ran]:
    """What was run and can be shown."""
    return [ran for ran in entry.ran if (root / ran.file).exists()]


def overview() -> Table:
    rows = []
    for name, entry in ENTRIES.items():
        ran = "; ".join(each.what for each in done(entry)) or "nothing"
        rows.append([name, entry.title, entry.commands[0], entry.cost, ran])
    notes = [
        "`femixer paper NAME` has all commands of one of them and the files with the numbers.",
        *([] if (REPOSITORY / "benchmarks").is_dir() else ["Results are in the repository, not in this installation."]),
    ]
    columns = [Column(title) for title in ("name", "table or figure", "command", "cost", "what has been run")]
    return Table.of(columns, rows, "", *notes)


def detail(name: str) -> list[str]:
    entry = ENTRIES[name]
    lines = [f"{entry.title} ({entry.label})", "", *(f"    {command}" for command in entry.commands)]
    lines += ["", f"Cost: {entry.cost}."]
    if entry.small:
        lines += ["", "On two CPU cores:", "", *(f"    {command}" for command in entry.small)]
    ran = [f"    {each.what} ({each.file})" for each in done(entry)]
    lines += ["", "What has been run:", "", *(ran or ["    nothing"])]
    return lines + (["", f"Not run: {entry.lacks}."] if entry.lacks else [])


def main(args: Sequence[str]) -> int:
    command = parse(Paper, args, "paper")
    if command.name is None:
        show(overview())
        return 0
    check(command.name in ENTRIES, "name", command.name, f"one of {', '.join(ENTRIES)}")
    print("\n".join(detail(command.name)))
    return 0
