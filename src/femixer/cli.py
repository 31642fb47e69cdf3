"""The command line: `femixer <command> [options]`."""

import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence

from femixer.damage import in_one_line
from femixer.kernels.dispatch import BackendError
from femixer.optional import MissingExtra, quiet
from femixer.options import dispatch, running
from femixer.tasks import TASKS
from femixer.training.distributed import Interrupted

COMMANDS = {
    "generate": ("femixer.tasks.lm.generate", "continue a prompt with a trained model"),
    "eval": ("femixer.tasks.lm.evaluate", "lm-evaluation-harness on a trained model"),
    "upgrade": ("femixer.surgery.command", "put FEM into a transformers model that you already have"),
    "inspect": ("femixer.tasks.lm.inspect", "where a trained model reads: figures and an interactive page"),
    "evidence": ("femixer.tasks.evidence", "what FEM gains over its priors: paired differences of recorded results"),
    "bench": ("femixer.bench", "speed and memory, as ratios measured in one run"),
    "paper": ("femixer.paper", "every table and figure of the paper: its command, its cost, what has been run"),
    "theory": ("femixer.theory.command", "the paper's proofs in numbers: tangent kernels, capacities, costs"),
    "doctor": ("femixer.doctor", "versions, backends, and a check of every operator against its definition"),
}
"""Besides the tasks."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 the doctor found something wrong, 2 wrong usage,
    130 interrupted (and resumable). Whatever goes wrong is one line on standard error."""
    args = [*(sys.argv[1:] if args is None else args)]
    if args[:1] == ["--version"]:
        from femixer import __version__

        print(f"femixer {__version__}")
        return 0
    quiet()
    try:
        with running(args):
            return dispatch("femixer", {**TASKS, **COMMANDS}, args) or 0
    except BrokenPipeError:  # `femixer ... | head`: nobody reads any more, and Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, FloatingPointError, BackendError, MissingExtra, OSError) as error:
        if sys.flags.dev_mode:  # python -X dev -m femixer ...: show where it comes from
            raise
        tell(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        return 2
    except Interrupted as stop:
        again = [*(arg for arg in args if arg not in ("--overwrite", "--resume")), "--resume"]
        tell(f"{stop}; continue with: {shlex.join(['femixer', *again])}")
        return 130
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        tell(f"error: {explained(error)}")
        return 2


NO_MEMORY = re.compile(r"allocate|out of memory|storage size|Storage size|numel: integer multiplication overflow")


def explained(error: Exception) -> str:
    """One line about an error that nobody has translated, with its traceback in a file: it may be a fault of ours."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        return f"there is not enough memory ({in_one_line(error)}); choose smaller sizes"
    with tempfile.NamedTemporaryFile("w", prefix="femixer-", suffix=".txt", delete=False, encoding="utf-8") as kept:
        kept.writelines(traceback.format_exception(error))
    return f"{in_one_line(error)} (unexpected, perhaps a fault of femixer; its traceback is in {kept.name})"


def tell(message: str) -> None:
    """Where torchrun runs the command in several processes, say which one speaks: an error may concern only that."""
    rank = os.environ.get("RANK")
    print(message if rank is None else f"[rank {rank}] {message}", file=sys.stderr)
