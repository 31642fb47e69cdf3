"""`femixer lm train` and `compare`: one language model, or several mixers on the same text and seeds; and `femixer lm
reproduce ROW`: a row of the paper's table of language models, from its data to the table."""

import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from femixer.models.named import NAMED, Rivals, parameter_count
from femixer.options import Count, check, check_different, check_options, parse, positional, with_recipe
from femixer.reporting import Row, Score, Table, marked
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.data.shards import Shards
from femixer.tasks.lm.evaluate import RESULTS
from femixer.tasks.lm.fit import Experiment, check_possible, of_text, rate, recorded, trained
from femixer.tasks.lm.model import ModelOptions, described
from femixer.tasks.lm.runs import by_model, by_text, draw_curves
from femixer.tasks.runner import DataJob, Run, note_of_priors
from femixer.training import EngineOptions, Results, RunOptions, atomic, distributed, show_table
from femixer.training.jobs import JobEngine, Jobs
from femixer.training.results import CHECKPOINTS, FIGURE, Record, Saving, environment, holds_run
from femixer.training.store import INDEX


@dataclass(frozen=True)
class Train:
    """Train a language model on text.

    Without any option it is a small model of the bytes of the Python standard library's sources. The results folder
    gets config.json, metrics.jsonl, samples.jsonl, figure.png, table.md and model/, which transformers' Auto classes,
    `femixer generate`, `femixer eval` and `femixer inspect` load. `--recipe NAME` (or a YAML file) gives other
    defaults for all of these options: paper-340m and paper-1.3b are the paper's.
    """

    experiment: Experiment
    data: DataOptions
    engine: EngineOptions
    run: RunOptions


def train(args: Sequence[str]) -> int:
    default = Train(Experiment(), DataOptions(), EngineOptions(), RunOptions(Path("results/lm")))
    default, args = with_recipe(default, args)
    command = parse(Train, args, "lm train", default)
    results = trained(command.experiment, command.data, command.engine, command.run)
    return show_table(results)


MODELS = {name: described(fields) for name, fields in NAMED.items()}
"""By the names of the paper's tables. GLA, AFT and Mamba are our normalized priors with the mean as read."""
SHOWN = (
    *("SMAttn", "SMAttn+C", "SMAttn+C,L", "SMAttn+C,L,T", "FEM-SM"),
    *("GLA", "FEM-GLA", "AFT", "FEM-AFT", "Mamba", "FEM-Mamba"),
)
ROWS: dict[str, tuple[str, ...]] = {
    "340m": (
        *("DiffTrans", "GatedDeltaNet", "DeltaNet", "SMAttn", "SMAttn+C", "SMAttn+C,L", "SMAttn+C,L,T", "FEM-SM"),
        *("GLA", "FEM-GLA"),
    ),
    "1.3b": ("DeltaNet", "GSA", "RetNet", "HGRN", "HGRN2", "SMAttn", "FEM-SM", "GLA", "FEM-GLA"),
}
"""Size -> rows from top to bottom, by the names of `femixer.models.named`."""
CUSTOM = "custom"
"""The model that --mixer, --prior and --parts describe."""


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    experiment: Experiment = field(default_factory=Experiment)
    models: tuple[str, ...] = SHOWN
    """Models by the names of the paper's tables; paper: those of its table of language models; all: every one;
    custom: the one that --mixer, --prior and --parts describe."""
    seeds: Count = 3
    """Number of seeds per model, counted up from --seed. Equal seeds see the text in the same order."""

    def validate(self) -> None:
        check_different(self, "models", (*MODELS, CUSTOM))
        for name in ("mixer", "prior", "parts") if CUSTOM not in self.models else ():
            given = getattr(self.experiment.model, name)
            check(given == getattr(ModelOptions(), name), name, given, "--models ... custom too: it describes that one")
        check_options(self)
        rows = [self.run(name).model.row for name in self.models]
        self.experiment.model.rivals.validate(*rows)
        self.experiment.model.mixing.validate(*rows)
        for name in self.models:
            self.run(name).validate()

    def run(self, name: str, number: int = 0) -> Experiment:
        """The run of a model with the first seed, the second, ..."""
        model = replace(self.experiment.model, **MODELS.get(name, {}))
        given = self.experiment.model.rivals.fitting(model.row).mixer_options
        own = () if name == CUSTOM else model.rivals.mixer_options
        model = replace(model, rivals=Rivals((*own, *given)), mixing=model.mixing.fitting(model.row))
        return replace(self.experiment, model=model, seed=self.experiment.seed + number)


@dataclass(frozen=True)
class Spec:
    """Everything that decides the numbers of one run; where the text lies does not."""

    model: str
    experiment: Experiment
    fingerprint: str
    """Of the text."""
    precision: str

    @property
    def title(self) -> str:
        return f"{self.model} seed {self.experiment.seed}"


@dataclass(frozen=True)
class LmJob(DataJob):
    """One run of a comparison, whose model stays."""

    keeps = True
    setting: Experiment
    """What all runs share."""
    engine: EngineOptions
    saving: Saving

    def read(self) -> Shards:
        return self.reading.tokens()

    def fitted(self, data: Shards, options: RunOptions) -> Record:
        experiment = self.spec.experiment
        options = replace(options, **vars(self.saving))
        results = trained(experiment, self.reading, self.engine, options, self.data)
        return distributed.on_main(lambda: self.record(results, data))

    def record(self, results: Results, data: Shards) -> Record:
        atomic.remove(results.folder / CHECKPOINTS)  # the model is saved, and nobody goes on from here
        experiment, metrics = self.spec.experiment, results.metrics()
        config = experiment.model.config(experiment.length, vocab_size=data.vocabulary)
        return {
            **recorded(results.folder, self.spec.model, self.data, asdict(self.setting)),
            "run": self.place,
            "seconds": metrics[-1]["seconds"],
            "tokens_per_second": rate(metrics),
            "parameter_count": parameter_count(config),
            "environment": environment(),
        }

    def summary(self, record: Record) -> str:
        return f"validation loss {record['loss']:.4f}"


@dataclass(frozen=True)
class LmRun(Run):
    """Train several mixers at equal parameters on the same text, with the same seeds and data order.

    Every run is a results folder of its own in runs/, as of `femixer lm train`; a finished one is not repeated: the
    same command, given again, goes on. The comparison gets figure.png (validation loss, mean and standard deviation
    over the seeds) and table.md.
    """

    divides = True
    groups = MappingProxyType({"all": tuple(MODELS), "paper": tuple(dict.fromkeys(chain(*ROWS.values())))})
    experiment: Comparison = field(default_factory=lambda: Comparison(Experiment(evaluate_every=50, sample_tokens=0)))
    data: DataOptions = field(default_factory=DataOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    saving: Saving = field(default_factory=Saving)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/lm-compare"), JobEngine(jobs=1, threads=None)))
    resume: bool = False
    """Go on with a comparison that must be there; without it the same command does, too."""

    def jobs(self) -> list[LmJob]:
        out, comparison = self.how.out, self.experiment
        check(not (self.resume and self.how.overwrite), "resume", True, "either --resume or --overwrite")
        check(not self.resume or (out / INDEX).exists(), "resume", True, f"a comparison to continue: {out} holds none")
        comparison.validate()
        self.saving.validate()
        for name in comparison.models:
            check_possible(comparison.run(name), self.engine)
        shards = self.data.tokens()
        for name in comparison.models:
            of_text(shards, comparison.run(name), self.engine)
        return [
            LmJob(
                Spec(name, comparison.run(name, number), shards.fingerprint, self.engine.precision),
                self.data.described(),
                DataOptions(shards=shards.folder.resolve()),
                comparison.experiment,
                self.engine,
                self.saving,
            )
            for number in range(comparison.seeds)
            for name in comparison.models
        ]

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return [table(self.experiment, records)]

    def figures(self, records: Sequence[Record]) -> dict[str, Any]:
        return {FIGURE: draw_curves(by_text(records))}


def table(comparison: Comparison, records: Sequence[Record]) -> Table:
    """Validation loss as mean and standard deviation over the seeds, the best in bold."""
    experiment, runs = comparison.experiment, by_model(records)
    reference = "SMAttn" if "SMAttn" in runs else next(iter(runs))
    counts = {name: each[0]["parameter_count"] for name, each in runs.items()}
    scores = [Score({run["seed"]: run["loss"] for run in each}, comparison.seeds) for each in runs.values()]
    losses = marked([score.cell(4, spread="deviation") for score in scores], higher=False)
    rows: list[Row] = []
    for (name, each), loss in zip(runs.items(), losses, strict=True):
        bits = statistics.mean(run["bits_per_byte"] for run in each)
        share, speed = counts[name] / counts[reference], statistics.median(run["tokens_per_second"] for run in each)
        rows.append([name, loss, f"{bits:.4f}", f"{counts[name]:,}", f"{share:.2%}", f"{speed:,.0f}"])
    seeds = [str(experiment.seed + number) for number in range(comparison.seeds)]
    over = f"seeds {', '.join(seeds)}: mean ± standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    title = f"Preset {experiment.model.preset}, {experiment.duration}, {over}."
    columns = ("model", "validation loss", "bits per byte", "parameters", f"of {reference}", "tokens/s")
    return Table.of(columns, rows, title, *note_of_priors({name.partition(", ")[0] for name in runs}))


GROUPS = {"340m": "340M parameters, 15B tokens", "1.3b": "1.3B parameters, 100B tokens"}


@dataclass(frozen=True)
class Reproduce:
    """A row of the paper's table of language models: train it, evaluate it on the paper's tasks, put it into the table.

    What is finished is kept, so the same command goes on after an interruption; the table has all rows that are
    evaluated in the folder. Options after `--` are those of `femixer lm train`, besides the recipe's:
    `femixer lm reproduce FEM-SM -- --accumulate 8 --data corpus.txt`.
    """

    row: Annotated[str, positional()]
    """Row by its name, SMAttn+C,L for the paper's FEM-SM (-G,T)."""
    size: Literal["340m", "1.3b"] = "340m"
    """Part of the table: 340m (15B tokens) or 1.3b (100B tokens)."""
    processes: Count = 1
    """Processes of the training, one for each GPU of this machine."""
    limit: float | None = None
    """Examples of each task, or their share: to see that all of it runs."""
    out: Path = Path("results/paper-lm")
    """Folder of the models, evaluations and the table."""
    dry_run: bool = False
    """Only print the three commands."""

    def validate(self) -> None:
        check(self.row in ROWS[self.size], "row", self.row, f"one of {', '.join(ROWS[self.size])} for {self.size}")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        check(world == 1, "WORLD_SIZE", world, "1: --processes starts those of the training")

    def commands(self, more: Sequence[str]) -> list[list[str]]:
        """Train, evaluate, tabulate. more: further options of the training."""
        model, scores = self.out / self.size / self.row, self.out / f"{self.size}-eval"
        several = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes), "-m", "femixer"]
        train = several if self.processes > 1 else ["femixer"]
        train += ["lm", "train", "--recipe", f"paper-{self.size}", *model_arguments(self.row), *more]
        evaluate = ["femixer", "eval", str(model), "--suite", "paper", "--out", str(scores / self.row)]
        evaluate += ["--resume"] if holds_run(scores / self.row) else []
        evaluate += [] if self.limit is None else ["--limit", f"{self.limit:g}"]
        rows = [
            f"{GROUPS[size]}/{row}={folder}"
            for size, names in ROWS.items()
            for row in names
            for folder in [self.out / f"{size}-eval" / row]
            if (folder / RESULTS).exists() or (size, row) == (self.size, self.row)
        ]
        table = ["femixer", "lm", "table", *rows, "--out", str(self.out / "table")]
        again = ["--resume"] if holds_run(model) else []
        return [[*train, "--out", str(model), *again], evaluate, table]


def model_arguments(row: str) -> list[str]:
    """The options of `femixer lm train` that make its model that row."""
    given = described(NAMED[row])
    (mixer,), (prior,), options = given["mixer"], given["prior"], given["rivals"].mixer_options
    if mixer == "fem":
        return ["--prior", prior, "--parts", given["parts"]]
    return ["--mixer", mixer, *(["--mixer-options", *options] if options else [])]


def reproduce(args: Sequence[str]) -> int:
    cut = [*args].index("--") if "--" in args else len(args)
    own, more = args[:cut], args[cut + 1 :]
    command = parse(Reproduce, own, "lm reproduce")
    command.validate()
    failed = 0
    for words in command.commands(more):
        print(shlex.join(words), flush=True)
        # With the interpreter that runs this, whatever is first on the path.
        start = ["-m", "torch.distributed.run" if words[0] == "torchrun" else "femixer"]
        run = [sys.executable, *start, *words[1:]]
        code = 0 if command.dry_run else subprocess.run(run, check=False).returncode
        if code == 1 and words[1] == "eval":  # some tasks failed, which it has told; the table shows the others
            failed = code
        elif code != 0:
            return code
    return failed
