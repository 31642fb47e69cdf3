"""The command line: `femixer <command> [options]`."""

import os
import shlex
import sys
from collections.abc import Sequence

from femixer.kernels.dispatch import BackendError
from femixer.optional import MissingExtra
from femixer.subcommands import dispatch
from femixer.tasks import TASKS
from femixer.training.processes import Interrupted

COMMANDS = {
    "generate": ("femixer.tasks.lm.generate", "continue a prompt with a trained model"),
    "eval": ("femixer.tasks.lm.evaluate", "lm-evaluation-harness on a trained model"),
    "upgrade": ("femixer.surgery.command", "put FEM into a transformers model that you already have"),
    "inspect": ("femixer.tasks.lm.inspect", "what a trained model reads: figures and a page to look around in"),
    "evidence": ("femixer.tasks.evidence", "what FEM gains over its priors: paired differences of recorded results"),
    "bench": ("femixer.bench.cli", "speed and memory, as ratios measured in one run"),
    "paper": ("femixer.paper", "every table and figure of the paper: its command, its cost, what has been run"),
    "theory": ("femixer.theory.command", "what the paper proves, in numbers: tangent kernels, capacities, costs"),
    "doctor": ("femixer.doctor", "versions, backends, and whether every operator computes what its definition says"),
}
"""Besides the tasks."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 the doctor found something wrong, 2 wrong usage,
    130 interrupted (and resumable)."""
    args = [*(sys.argv[1:] if args is None else args)]
    if args[:1] == ["--version"]:
        from femixer import __version__

        print(f"femixer {__version__}")
        return 0
    try:
        return dispatch("femixer", {**TASKS, **COMMANDS}, args) or 0
    except BrokenPipeError:  # `femixer ... | head`: nobody reads any more, and Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, FloatingPointError, BackendError, MissingExtra, OSError) as error:
        if sys.flags.dev_mode:  # python -X dev -m femixer ...: show where it comes from
            raise
        tell(f"error: {error}")
        return 2
    except Interrupted as stop:
        again = [*(arg for arg in args if arg not in ("--overwrite", "--resume")), "--resume"]
        tell(f"{stop}; continue with: {shlex.join(['femixer', *again])}")
        return 130
    except KeyboardInterrupt:
        return 130


def tell(message: str) -> None:
    """Where torchrun runs the command in several processes, say which one speaks: an error may concern only that."""
    rank = os.environ.get("RANK")
    print(message if rank is None else f"[rank {rank}] {message}", file=sys.stderr)
