"""A corpus: documents from any number of sources, cut into parts that are read independently, and a held-out split."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from femixer.options import check, check_positive
from femixer.tasks.lm.data.sources import (
    ADDRESS,
    LINES_ENDINGS,
    PACKED_ENDINGS,
    PARQUET_ENDINGS,
    TEXT_ENDINGS,
    Dataset,
    Document,
    Slice,
    after_line_end,
    lines_slices,
    parquet_slices,
    text_slices,
)

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

STANDARD_LIBRARY = "python"
"""The source that needs no download: the Python standard library's own files."""
LONG = 1 << 28
"""Bytes of a source above which its contents are not read to know it again."""

SMALLEST_PART, LARGEST_PART, PARTS = 4 << 20, 256 << 20, 1024
"""Files are cut into about PARTS parts of 4 to 256 MiB: enough to share out, few enough to keep as files."""


@dataclass(frozen=True)
class Part:
    """A share of the corpus that one worker reads. `split` is None where every document is assigned by its hash."""

    slices: tuple[Slice, ...]
    split: str | None
    fraction: float

    @property
    def size(self) -> int:
        return sum(one.size for one in self.slices)

    def documents(self) -> Iterator[tuple[str, Document]]:
        """(split, document), without the empty ones."""
        for one in self.slices:
            for document in one.documents():
                if document.text:
                    yield self.split or assigned(document, self.fraction), document


@dataclass(frozen=True)
class Corpus:
    """`parts` in their order make up the corpus; `identity` changes whenever the text may have changed.

    Parts that are held out come first, so that they are there when reading stops early.
    """

    name: str
    parts: tuple[Part, ...]
    identity: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes on the disk; what the `datasets` package reads is not counted."""
        return sum(part.size for part in self.parts)

    def documents(self, split: str = TRAIN) -> Iterator[Document]:
        """All documents of one split, in order."""
        for part in self.parts:
            if part.split in (None, split):
                yield from (document for where, document in part.documents() if where == split)


def open_corpus(
    data: Sequence[str | Path] = (STANDARD_LIBRARY,),
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.05,
    text_field: str = "text",
    part_bytes: int | None = None,
) -> Corpus:
    """List what there is to read; nothing is read yet.

    data                  files (text, .jsonl, .parquet; .gz of the first two), folders of them, `python`, or
                          `datasets:NAME[@REVISION][:CONFIG[:SPLIT]]`
    validation            sources that are held out, instead of a share of `data`
    validation_fraction   the share of `data` held out otherwise: documents chosen by a hash of their text; the end of
                          the text where the corpus is a single text file
    text_field            the field of JSON lines, parquet and `datasets` that holds the text
    part_bytes            size of a part, by default by the size of the corpus
    """
    check(len(data) > 0, "data", data, "at least one file, folder, 'python' or datasets:NAME")
    check(0 < validation_fraction < 1, "validation_fraction", validation_fraction, "a number between 0 and 1")
    check_positive(part_bytes=part_bytes)
    training = [Source.find(str(one), text_field, "data") for one in data]
    held_out = [Source.find(str(one), text_field, "validation") for one in validation]
    total = sum(source.size for source in (*training, *held_out))
    part = part_bytes or min(max(total // PARTS, SMALLEST_PART), LARGEST_PART)

    if held_out:
        shares = cut(held_out, part, VALIDATION) + cut(training, part, TRAIN)
    elif (single := single_text(training)) is not None:
        shares = cut_tail(single, part, validation_fraction)
    else:
        shares = cut(training, part, None, validation_fraction)
    identity = {
        "data": [source.identity for source in training],
        "validation": [source.identity for source in held_out] or validation_fraction,
        "text_field": text_field,
        "part_bytes": part,
    }
    return Corpus("+".join(source.name for source in training), tuple(shares), identity)


@dataclass(frozen=True)
class Source:
    """What one entry of `data` stands for: files in order, or a data set of the `datasets` package."""

    name: str
    files: tuple[Path, ...]
    root: Path | None
    field: str
    dataset: Dataset | None = None

    @classmethod
    def find(cls, address: str, field: str, argument: str) -> Source:
        """The source of an address; `argument` is who asks, for the errors."""
        if address.startswith("datasets:"):
            dataset = Dataset.parse(address.removeprefix("datasets:"), field)
            name = "-".join(filter(None, (Path(dataset.name).name, dataset.config)))
            return cls(name, (), None, field, dataset)
        path = Path(address).expanduser()
        if path.is_file():
            check(path.stat().st_size > 0, argument, address, "a file that is not empty")
            if path.suffix not in (*PARQUET_ENDINGS, *PACKED_ENDINGS):
                # Images, weights, archives and UTF-16 would be trained on as if they were writing.
                with path.open("rb") as file:
                    at = file.read(HEAD).find(b"\0")
                check(at < 0, argument, address, f"text in UTF-8: byte {at} of this file is zero")
            return cls(unpacked(path).stem, (path,), path.parent, field)
        if path.is_dir():
            files = tuple(walk(path))
            endings = ", ".join((*TEXT_ENDINGS, *LINES_ENDINGS, *PARQUET_ENDINGS))
            check(len(files) > 0, argument, address, f"a folder with files that are not empty and end in {endings}")
            return cls(path.resolve().name, files, path, field)
        allowed = f"a file, a folder, 'python' (the standard library) or {ADDRESS}"
        check(address == STANDARD_LIBRARY, argument, address, allowed, "is not there")
        return cls("python", tuple(standard_library()), Path(sysconfig.get_path("stdlib")), field)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the text: names and contents of the files, or the address and extent of a data set. Files of
        a source that takes long to read are known by size and time, and so change when they are copied."""
        if self.dataset is not None:
            # Without a revision the hub may serve another text tomorrow; the number of parts may tell.
            return {"source": str(self.dataset), "parts": self.dataset.open().num_shards}
        digest = hashlib.sha256()
        assert self.root is not None
        for path in self.files:
            at = path.stat()
            with path.open("rb") as file:
                seen = at.st_mtime_ns if self.size > LONG else hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(json.dumps([path.relative_to(self.root).as_posix(), at.st_size, seen]).encode())
        return {"source": self.name, "files": len(self.files), "bytes": self.size, "digest": digest.hexdigest()[:16]}

    def slices(self, part: int) -> Iterator[Slice]:
        if self.dataset is not None:
            yield from self.dataset.slices()
        for path in self.files:
            kind = ending(path)
            if kind in LINES_ENDINGS:
                yield from lines_slices(path, part, self.field)
            elif kind in PARQUET_ENDINGS:
                yield from parquet_slices(path, part, self.field)
            else:
                yield from text_slices(path, part)


def cut(sources: Sequence[Source], part: int, split: str | None, fraction: float = 0.0) -> list[Part]:
    """Parts of about `part` bytes, in order; every part of a `datasets` source stays on its own."""
    parts: list[Part] = []
    waiting: list[Slice] = []
    size = 0
    for source in sources:
        for one in source.slices(part):
            waiting.append(one)
            size += one.size
            if source.dataset is not None or size >= part:
                parts.append(Part(tuple(waiting), split, fraction))
                waiting, size = [], 0
    return [*parts, *([Part(tuple(waiting), split, fraction)] if waiting else [])]


def cut_tail(path: Path, part: int, fraction: float) -> list[Part]:
    """A single text file: its end is held out, from the start of a line on."""
    size = path.stat().st_size
    with path.open("rb") as file:
        edge = after_line_end(file, max(1, round(size * (1 - fraction))))
    if not 0 < edge < size:
        told = f"cuts nothing off {path}, which has {size} bytes and too few lines"
        raise ValueError(f"validation_fraction={fraction} {told}")
    shares = {VALIDATION: text_slices(path, part, start=edge), TRAIN: text_slices(path, part, stop=edge)}
    return [Part((one,), split, fraction) for split, slices in shares.items() for one in slices]


def single_text(sources: Sequence[Source]) -> Path | None:
    """The text file that is the whole corpus, if there is one that can be cut."""
    files = [path for source in sources for path in source.files]
    if len(files) != 1 or any(source.dataset for source in sources):
        return None
    return None if ending(files[0]) in LINES_ENDINGS + PARQUET_ENDINGS or files[0] != unpacked(files[0]) else files[0]


def assigned(document: Document, fraction: float) -> str:
    """The split of a document: a function of its text alone, so that copies fall on the same side."""
    key = document.text if document.key is None else document.key
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return VALIDATION if int.from_bytes(digest, "little") < fraction * 2**64 else TRAIN


def walk(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The readable files below a folder in the order of their names; hidden and empty ones are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for name in sorted(names):
            path = Path(place, name)
            wanted = ending(path) in TEXT_ENDINGS + LINES_ENDINGS + PARQUET_ENDINGS
            if wanted and not name.startswith(".") and path.stat().st_size:
                yield path


HEAD = 1 << 16
"""Bytes of a file that are looked at to see whether it is text."""


def standard_library() -> Iterator[Path]:
    """The Python files of the standard library, without its tests and what was installed beside it."""
    skipped = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    files = walk(Path(sysconfig.get_path("stdlib")), skipped)
    return (path for path in files if path.suffix == ".py")


def unpacked(path: Path) -> Path:
    """`data.jsonl` for `data.jsonl.gz`."""
    return path.with_suffix("") if path.suffix in PACKED_ENDINGS else path


def ending(path: Path) -> str:
    return unpacked(path).suffix.lower()
