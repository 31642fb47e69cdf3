"""Files that are there completely or not at all, whenever the process or the machine dies."""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from femixer.options import check

PARTIAL = ".partial"
"""Ending of names under which nothing finished is kept; whoever finds one may delete it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what is written there (a file, or a folder of files) becomes `path`.

    The content reaches the disk before the rename, and the rename before this returns. A folder takes the place of
    another in two renames.
    """
    partial = begin(path)
    try:
        yield partial
        commit(partial, path)
    finally:
        remove(partial)


@contextmanager
def replacing_files(folder: Path, last: str = "", old: str = "") -> Iterator[Path]:
    """Yield an empty folder inside `folder`, which is made; the files written there (and in folders there) take the
    place of those of the same names in `folder`, when all are complete. If anything fails, what was there stays.

    last: the name whose file is put in place after all others. old: a pattern of names that are removed before.
    """
    made = not folder.exists()
    partial = begin(folder / "new", folder=True)
    try:
        yield partial
        for path in [*([folder / last] if last else []), *(folder.glob(old) if old else [])]:
            remove(path)
        files = [path for path in partial.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path.name == last, path)):
            place = folder / path.relative_to(partial)
            place.parent.mkdir(exist_ok=True)
            commit(path, place)
    finally:
        remove(partial)
        if made and not any(folder.iterdir()):
            folder.rmdir()


NEW = "replacement"
"""In a folder: what is made to take the place of its content. With these endings, how far that has got."""
LEAVING, ENTERING, OLD = NEW + ".complete", NEW + ".placing", "replaced" + PARTIAL


def begin_replacement(folder: Path) -> Path:
    """An empty folder inside `folder`, for what shall take the place of its content when it is complete."""
    remove(folder / NEW)
    (folder / NEW).mkdir()
    return folder / NEW


def is_being_replaced(folder: Path) -> bool:
    """Whether `replace_content` has begun and not ended."""
    return (folder / LEAVING).is_dir() or (folder / ENTERING).is_dir()


def replace_content(folder: Path, stale: Iterable[str] = (), last: Sequence[str] = ()) -> None:
    """What is in the replacement of `folder`, complete now, takes the place of whatever has the same names there, and
    of the names `stale`. Names in `last` are put in place after all others, in this order.

    All of it is renaming. After a crash in the middle everything is in one of the two states below, and the next call
    goes on from there.
    """
    leaving, entering, old = folder / LEAVING, folder / ENTERING, folder / OLD
    if not is_being_replaced(folder):
        remove(old)
        sync(folder / NEW)
        os.replace(folder / NEW, leaving)
    if leaving.is_dir():
        old.mkdir(exist_ok=True)
        for name in {*stale, *(path.name for path in leaving.iterdir())}:
            if (folder / name).exists() or (folder / name).is_symlink():
                os.replace(folder / name, old / name)
        sync(folder)
        os.replace(leaving, entering)
    order = {name: place for place, name in enumerate(last)}
    for name in sorted((path.name for path in entering.iterdir()), key=lambda name: order.get(name, -1)):
        os.replace(entering / name, folder / name)
    sync(folder)
    remove(old)
    entering.rmdir()


def begin(path: Path, folder: bool = False) -> Path:
    """The temporary name beside `path`, under which there is nothing, or an empty folder."""
    partial = path.with_name(path.name + PARTIAL)
    remove(partial)
    if folder:
        partial.mkdir(parents=True)
    return partial


def commit(partial: Path, path: Path) -> None:
    """Put what is under the temporary name on the disk, and then under its own name."""
    for part in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
        sync(part)
    if partial.is_dir() and path.is_dir():
        old = begin(path.with_name(path.name + ".old"))
        os.replace(path, old)
        os.replace(partial, path)
        remove(old)
    else:
        os.replace(partial, path)
    sync(path.parent)


def check_free(option: str, folder: Path, own: Collection[str] = (), instead: str = "") -> None:
    """Raise a ValueError that names the option if a folder holds anything but files of these names and what was not
    finished. instead: what else it might be, "a store, or "."""
    strangers = sorted(path.name for path in folder.iterdir() if path.suffix != PARTIAL and path.name not in own)
    holds = ", ".join(strangers[:3])
    check(not strangers, option, str(folder), f"{instead}a new or empty folder (this one holds {holds})")


def write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Ask the system to put a file's content, or a folder's list of names, on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders, and renames reach its disk in order
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
