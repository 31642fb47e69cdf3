"""What a task is to the command line: one small object, which is served with `run`, `table` and `export`.

It says what is run (`Run`) and how the records are shown (`Tabulate`). The store, finished jobs that are not repeated,
shares of the jobs (`--part`), processes and clusters, files of tables and exported results come with it.
"""

import io
import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from femixer.damage import Fields
from femixer.options import (
    Commands,
    Count,
    Whole,
    check,
    check_options,
    dispatch,
    expanded,
    lacks_option,
    named,
    parse,
    with_recipe,
)
from femixer.reporting import Cell, Table, as_markdown, write
from femixer.reporting.figures import save
from femixer.training import atomic, distributed, jobs, store
from femixer.training.jobs import Job, Jobs
from femixer.training.results import TABLE, Record, RunOptions, check_no_run
from femixer.training.store import RECORD, Kind


def told(data: str, about: str) -> str:
    """Which data, in words; a default that nobody named is said in the first line of the command.

    about: what the default is.
    """
    if not lacks_option("--data"):
        return data
    text = f"{data}, {about} (no --data was given)"
    distributed.say(f"data: {text}")
    return text


def over_seeds(records: Sequence[Record]) -> str:
    """For the notes of a table: what its numbers are over."""
    seeds = sorted({record["seed"] for record in records})
    return f"mean ± standard error over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"


def usual_notes(records: Sequence[Record], rows: Iterable[Iterable[object]]) -> list[str]:
    """What a reader must know of any table where it applies: unfinished jobs, and trainings that diverged."""
    text = []
    if any(isinstance(each, Cell) and each.missing for row in rows for each in row):
        text.append("In brackets: what is finished, where that is not all. Such values are never bold.")
    diverged = sorted({record["model"] for record in records if record.get("diverged")})
    if diverged:
        text.append(f"Training diverged, in some runs, of {', '.join(diverged)}; what they reached before that counts.")
    return text


def note_of_priors(models: Container[str]) -> list[str]:
    """Which names are not those of the published layers, where there are any."""
    note = "GLA, Mamba and AFT are the normalized priors with the mean as read, not the published layers."
    return [note] if any(name in models for name in ("GLA", "Mamba", "AFT")) else []


def report(out: Path, tables: Sequence[Table], figures: Mapping[str, Any] | None = None) -> None:
    """Show tables, and put them into a folder as files, with figures (name of a file -> one of matplotlib)."""
    with atomic.replacing_files(out) as new:
        for name, drawing in (figures or {}).items():
            save(drawing, new / name)
        write(new, tables)
    print(as_markdown(*tables))
    drawn = f", with {', '.join(figures)}" if figures else ""
    print(f"The table is in {out}/ as Markdown, LaTeX and CSV{drawn}")


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Those of an experiment."""

    seeds: Count = 1
    """Number of seeds, counted up from --seed."""
    seed: Whole = 0
    """The first seed."""

    def every_seed(self) -> range:
        check_options(self)
        return range(self.seed, self.seed + self.seeds)


class Shown(ABC):
    """How records are shown."""

    @abstractmethod
    def tables(self, records: Sequence[Record]) -> list[Table]:
        """At the end of a run, or in the layout of the paper."""

    def figures(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Name of a file -> a figure of matplotlib, to stand beside the tables."""
        return {}


class Run(Shown):
    """The options of `femixer NAME run`: a dataclass with what is run; its docstring is the help."""

    experiment: Any
    """What to train, and with which options."""
    how: Jobs
    divides: ClassVar[bool] = False
    """Whether the processes that torchrun starts may share each job."""
    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """What the experiment's `models` may say besides names, and which models that stands for."""

    def jobs(self) -> Sequence[Job]:
        """Each once; a ValueError if one of them is not possible."""
        return self.experiment.jobs()

    @property
    def resumable(self) -> bool:
        """Save checkpoints, so that a job which was stopped goes on. Not worth it for jobs of a minute."""
        return True

    @classmethod
    def parse(cls, args: Sequence[str], command: str) -> Self:
        default, args = with_recipe(cls(), args)
        asked: Any = parse(cls, args, command, default)
        if cls.groups:
            models = expanded(asked.experiment.models, cls.groups)
            asked = replace(asked, experiment=replace(asked.experiment, models=models))
        return asked


@dataclass(frozen=True)
class TableFiles:
    """Put results of `run` into tables, the paper's figures beside ours where there are any.

    Writes table.md, which it prints, table.tex and table.csv.
    """

    results: tuple[Path, ...]
    """Stores of `run`, results folders of `train`, or files of `export`."""
    out: Path | None = None
    """Folder of the files. [default: results/NAME-table, with the name of the task]"""


class Tabulate(Shown):
    """The options of `femixer NAME table`, where they are more than files: a dataclass; its docstring is the help."""

    results: tuple[Path, ...]
    out: Path


@dataclass(frozen=True)
class DataJob(Job):
    """A training on data, and where these are; the latter may differ from machine to machine."""

    spec: Any
    """Everything that decides the numbers, among it a `title` and the `fingerprint` of the data."""
    data: str
    """Address of the data."""
    reading: Any
    """How they are read."""

    @property
    def definition(self) -> Any:
        return self.spec

    @property
    def title(self) -> str:
        return self.spec.title

    def carry_out(self, options: RunOptions) -> Record:
        options.apply()
        data = self.read()
        if data.fingerprint != self.spec.fingerprint:
            raise ValueError(f"data={self.data!r} has changed since the job was made")
        return self.fitted(data, options)

    @abstractmethod
    def read(self) -> Any:
        """The data, which have a fingerprint."""

    @abstractmethod
    def fitted(self, data: Any, options: RunOptions) -> Record:
        """Train on the data, in the folder of `options`."""


@dataclass(frozen=True)
class Export:
    """Write all records of finished trainings into one JSON file, which other commands read like the originals."""

    results: tuple[Path, ...]
    """Stores of `run` or `compare`, or files that this command wrote."""
    out: Path
    """The file."""


@dataclass(frozen=True)
class Task:
    """A task: its trainings are jobs of a store."""

    name: str
    """Of the command."""
    format: int | str
    """In stores and exported files. A change of the data, the models or the record makes it another."""
    run: type[Run] | str
    """Or `module:class`, which is imported only when its command is called."""
    table: type[Tabulate] | str | None = None
    """None: what `run` shows."""
    run_help: str = "models x seeds, as jobs of a results store"
    table_help: str = "results in the layout of the paper's table"
    names: tuple[str, str] = ("run", "table")
    """What these two commands are called."""
    record: Fields = field(default_factory=dict)
    """What its tables need of a record, as `femixer.damage.check_fields` takes it: a damaged one is named."""
    read: Callable[..., list[Record]] | str | None = None
    """Paths -> their records, or `module:function`, where stores and exported files are not all that has some."""
    others: Commands = field(default_factory=dict)
    """Its other commands, as `femixer.options.dispatch` takes them."""

    @property
    def kind(self) -> Kind:
        return Kind(self.name, self.format, self.record, self.names[0])

    @property
    def commands(self) -> Commands:
        of_jobs = zip(self.names, ((self._run, self.run_help), (self._table, self.table_help)), strict=True)
        return {**self.others, **dict(of_jobs), "export": (self._export, "recorded results as one small file")}

    def main(self, args: Sequence[str]) -> int | None:
        """`femixer NAME <command> [options]`."""
        return dispatch(f"femixer {self.name}", self.commands, args)

    def load(self, *paths: str | os.PathLike[str]) -> list[Record]:
        """The records of stores (folders), of results folders of single trainings where the task keeps them, or of
        files that `femixer NAME export` wrote."""
        if self.read is not None:
            return named(self.read)(*paths)
        return [record for path in paths for record in store.load(path, self.kind)]

    def keep(self, record: Record, folder: Path) -> None:
        """Write the record of one training into its results folder, which `load` then reads like a store."""
        store.export([record], folder / RECORD, self.kind)

    def _run(self, args: Sequence[str]) -> int:
        command = named(self.run).parse(args, f"{self.name} {self.names[0]}")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        single = "1: jobs are processes of their own, start them without torchrun"
        check(world == 1 or command.divides, "WORLD_SIZE", world, single)
        if world > 1:
            distributed.start(command.how.engine.device)
            sys.stdout = sys.stdout if distributed.is_main() else io.StringIO()
        try:
            ran = jobs.run(command.jobs(), self.kind, command.how, command.resumable)
        except KeyboardInterrupt:
            distributed.say("interrupted; what is finished is kept, and the same command goes on from there")
            return 130
        if ran is None:
            return 0
        records, failed = ran
        if records:
            try:
                self._show(command, records)
            except ValueError as error:  # the jobs are done; that older ones do not fit is not their fault
                print(f"no table: {error}")
        out = command.how.out
        again = shlex.join(["femixer", *self.name.split(), self.names[1], "--results", str(out)])
        print(f"Results are in {out}/; `{again}` makes files of them")
        return 1 if failed else 0

    def _show(self, command: Run, records: Sequence[Record]) -> None:
        text, drawings, out = as_markdown(*command.tables(records)), command.figures(records), command.how.out
        print(text)
        if command.how.part is None and distributed.is_main():
            store.put(out / TABLE, text)
            for name, drawing in drawings.items():
                save(drawing, out / name)

    def _table(self, args: Sequence[str]) -> int:
        command = parse(named(self.table or TableFiles), args, f"{self.name} {self.names[1]}")
        out = command.out or Path("results") / f"{self.name.replace(' ', '-')}-table"
        check_no_run(out)
        records = self.load(*command.results)
        stores = f"stores where `femixer {self.name} {self.names[0]}` has finished some"
        check(len(records) > 0, "results", "without a finished job", stores)
        if self.table is None:
            report(out, named(self.run)().tables(records))
        else:
            report(out, command.tables(records), command.figures(records))
        return 0

    def _export(self, args: Sequence[str]) -> int:
        command = parse(Export, args, f"{self.name} export")
        check(not command.out.is_dir(), "out", str(command.out), "a file")
        records = self.load(*command.results)
        check(len(records) > 0, "results", "without a finished training", "stores or folders that have some")
        store.export(records, command.out, self.kind)
        print(f"{len(records)} record{'s are' if len(records) != 1 else ' is'} in {command.out}")
        return 0
