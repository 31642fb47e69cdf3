"""Compiled CPU kernels (numba) for recurrences that do not map to matrix products.

Modules in here import numba and work on numpy arrays; nothing imports them but `femixer.kernels.backend`, lazily.
"""

from contextlib import suppress
from pathlib import Path


def _forget_outdated() -> None:
    """Delete cached kernels that may be older than what they inline: numba looks only at a kernel's own file."""
    here = Path(__file__).parent
    newest = max(path.stat().st_mtime for path in here.glob("*.py"))
    for path in here.glob("__pycache__/*.nb[ic]"):
        with suppress(OSError):  # another process did it, or the folder is not ours to write
            if path.stat().st_mtime < newest:
                path.unlink()


_forget_outdated()
