"""How much memory there is: what cannot fit is refused before it is made."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from femixer.options import check

GROUPS = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Where a container's memory is told, by version 2 and 1 of control groups: files of the limit and of what is used, and
the line of memory.stat with what of that are copies of files, which give way."""


def installed() -> int | None:
    """Bytes of main memory that this machine has, or its container may use; None where the system does not say."""
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    return min([*found, *(limit for limit, _ in _groups())])


def _groups() -> Iterator[tuple[int, int]]:
    """The limit of the container and what it uses of that, in bytes; 0 where only the limit is told."""
    for folder, (limit, used, of_files) in GROUPS.items():
        try:
            most = int((folder / limit).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
        try:
            now = int((folder / used).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            yield most, max(0, now - int(stat[of_files]))
        except (OSError, ValueError, KeyError):
            yield most, 0


def free(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([available, *(max(0, limit - used) for limit, used in _groups())])


def check_fits(parameters: int, name: str, value: object) -> None:
    """Raise a ValueError if a model of so many parameters cannot be trained here. name, value: of the option.

    A parameter takes 16 bytes: itself, its gradient and Adam's two moments in float32. Where there is a GPU only the
    model itself is made in main memory, and several processes may share one.
    """
    alone = not torch.cuda.is_available() and os.environ.get("WORLD_SIZE", "1") == "1"
    there, needed = installed(), parameters * (16 if alone else 4)
    what = "in training" if alone else "alone"
    allowed = f"smaller sizes: {parameters:,} parameters take {gigabytes(needed)} {what}"
    check(there is None or needed <= there, name, value, f"{allowed}, and this machine has {gigabytes(there or 0)}")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"
