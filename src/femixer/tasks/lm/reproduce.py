"""`femixer lm reproduce ROW`: a row of the paper's table of language models, from its data to the table."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from femixer.models.named import NAMED
from femixer.optional import require
from femixer.options import check, check_positive, parse
from femixer.tasks.lm.evaluate import RESULTS
from femixer.tasks.lm.model import described
from femixer.training.results import holds_run

tyro = require("tyro", "cli")

ROWS: dict[str, tuple[str, ...]] = {
    "340m": (
        *("DiffTrans", "GatedDeltaNet", "DeltaNet", "SMAttn", "SMAttn+C", "SMAttn+C,L", "SMAttn+C,L,T", "FEM-SM"),
        *("GLA", "FEM-GLA"),
    ),
    "1.3b": ("DeltaNet", "GSA", "RetNet", "HGRN", "HGRN2", "SMAttn", "FEM-SM", "GLA", "FEM-GLA"),
}
"""Size -> rows from top to bottom, by the names of `femixer.models.named`."""
GROUPS = {"340m": "340M parameters, 15B tokens", "1.3b": "1.3B parameters, 100B tokens"}


@dataclass(frozen=True)
class Reproduce:
    """A row of the paper's table of language models: train it, evaluate it on the paper's tasks, put it into the table.

    What is finished is kept, so the same command goes on after an interruption; the table has all rows that are
    evaluated in the folder. Options after `--` are those of `femixer lm train`, besides the recipe's:
    `femixer lm reproduce FEM-SM -- --accumulate 8 --data corpus.txt`.
    """

    row: Annotated[str, tyro.conf.Positional]
    """Row by its name, SMAttn+C,L for the paper's FEM-SM (-G,T)."""
    size: Literal["340m", "1.3b"] = "340m"
    """Part of the table: 340m (15B tokens) or 1.3b (100B tokens)."""
    processes: int = 1
    """Processes of the training, one for each GPU of this machine."""
    limit: float | None = None
    """Examples of each task, or their share: to see that all of it runs."""
    out: Path = Path("results/paper-lm")
    """Folder of the models, evaluations and the table."""
    dry_run: bool = False
    """Only print the three commands."""

    def validate(self) -> None:
        check(self.size in ROWS, "size", self.size, f"one of {', '.join(ROWS)}")
        check(self.row in ROWS[self.size], "row", self.row, f"one of {', '.join(ROWS[self.size])} for {self.size}")
        check_positive(processes=self.processes)
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


def main(args: Sequence[str]) -> int:
    own, more = [*args], []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    command = parse(Reproduce, own, "lm reproduce")
    command.validate()
    failed = 0
    for words in command.commands(more):
        print(shlex.join(words), flush=True)
        code = 0 if command.dry_run else carried_out(words)
        if code == 1 and words[1] == "eval":  # some tasks failed, which it has told; the table shows the others
            failed = code
        elif code != 0:
            return code
    return failed


def carried_out(words: Sequence[str]) -> int:
    """The exit code, with the interpreter that runs this, whatever is first on the path."""
    start = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else ["-m", "femixer"]
    return subprocess.run([sys.executable, *start, *words[1:]], check=False).returncode
