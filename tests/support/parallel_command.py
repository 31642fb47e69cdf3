"""`torchrun ... parallel_command.py STEP ARGUMENTS`: a femixer command of whose ranks the second is killed as soon as
the checkpoint of that step is saved."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from femixer.cli import main
from femixer.training import checkpoint, distributed

save = checkpoint.save


def saved(folder: Path, model: Any, optimizer: Any, position: checkpoint.Position, keep: int = 2) -> None:
    save(folder, model, optimizer, position, keep)
    if position.step == int(sys.argv[1]) and distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    checkpoint.save = saved
    sys.exit(main(sys.argv[2:]))
