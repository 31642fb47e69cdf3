"""Compiled CPU kernels (numba) for recurrences that do not map to matrix products.

Modules in here import numba and work on numpy arrays; nothing imports them but `femixer.kernels.backend`, lazily.
"""

from contextlib import suppress
from pathlib import Path


def _forget_outdated() -> None:
    """Delete cached kernels that are older than what they inline: numba looks only at the file of a kernel itself."""
    here = Path(__file__)
    names = ("primitives.py", "narrow.py", "streams.py", "gates.py")
    shared = max(here.with_name(name).stat().st_mtime for name in names)
    for path in here.parent.glob("__pycache__/*.nb[ic]"):
        with suppress(OSError):  # another process did it, or the folder is not ours to write
            if path.stat().st_mtime < shared:
                path.unlink()


_forget_outdated()
