"""One process at a time works in a results folder. The lock goes with its process, however that ends; on a disk that
knows no locks (some network disks) there is none, which is said.

lock            held while somebody works in the folder
lock.json       who: process, machine and since when
"""

import contextlib
import errno
import json
import os
import platform
import time
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

from femixer.training import atomic

LOCK, HOLDER = "lock", "lock.json"
# What a disk answers that knows no locks.
UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# By folder: a process that stopped in the middle may go on in the same folder.
_held: dict[Path, FileLock] = {}


def hold(folder: Path) -> None:
    """Lock a folder for this process, or raise a ValueError that says who works in it."""
    folder = folder.resolve()
    if folder in _held and (folder / LOCK).exists():
        return
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"out={str(folder)!r} is in use by {_holder(folder)}; wait for it to end, or choose another --out"
        ) from None
    except (OSError, NotImplementedError) as error:
        if not isinstance(error, NotImplementedError) and error.errno not in UNKNOWN:
            raise
        warnings.warn(f"{folder} is on a disk without locks: start no second process in it", stacklevel=2)
        return
    _held[folder] = lock
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"process": os.getpid(), "machine": platform.node(), "since": now}
    atomic.write(folder / HOLDER, json.dumps(holder) + "\n")


def release(folder: Path) -> None:
    """Let others into a folder again; nothing happens if this process does not hold it."""
    folder = folder.resolve()
    lock = _held.pop(folder, None)
    if lock is None:
        return
    for name in (HOLDER, LOCK):  # while it is held: afterwards they may be another's
        with contextlib.suppress(PermissionError):  # Windows removes no file that is open
            (folder / name).unlink(missing_ok=True)
    lock.release()


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['machine']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
