"""Where text comes from: slices of files and data sets, each of which can be read on its own and again.

A slice is a small value that travels to a worker process. `size` is what it takes on the disk (bytes), and
`documents()` reads it. Text is UTF-8; bytes that are not become U+FFFD.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from femixer.optional import require
from femixer.options import check

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".tex", ".py")
LINES_ENDINGS = (".jsonl", ".ndjson")
PARQUET_ENDINGS = (".parquet",)
PACKED_ENDINGS = (".gz", ".zst")

PIECE = 1 << 20
"""Bytes of a text file read at once."""

LONG_LINE = 1 << 16
"""Bytes after which the end of a line is no longer looked for."""


class Document(NamedTuple):
    """A document, or a piece of one: the first piece begins it and the last one ends it."""

    text: str
    begins: bool = True
    ends: bool = True
    key: str | None = None
    """What decides on which side of the validation split it falls: its text if None, so that copies stay together."""


class Slice(Protocol):
    @property
    def size(self) -> int: ...

    def documents(self) -> Iterator[Document]: ...


@dataclass(frozen=True)
class FileSlice:
    """Bytes start to stop of a file."""

    path: Path
    start: int
    stop: int | None
    """None: to the end of a packed file, whose length is not known."""

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.stop is None else self.stop - self.start


@dataclass(frozen=True)
class TextSlice(FileSlice):
    """Part of a text file. All slices of a file together are one document."""

    begins: bool
    ends: bool

    def documents(self) -> Iterator[Document]:
        with open_bytes(self.path) as file:
            file.seek(self.start)
            if self.stop is not None and self.begins and self.ends and self.size <= PIECE:
                yield Document(file.read(self.size).decode("utf-8", "replace"))
                return
            raw, begins = b"", self.begins
            for following in pieces(file, self.stop):
                if raw:
                    yield Document(raw.decode("utf-8", "replace"), begins, False, self.path.name)
                    begins = False
                raw = following
            yield Document(raw.decode("utf-8", "replace"), begins, self.ends, self.path.name)


@dataclass(frozen=True)
class LinesSlice(FileSlice):
    """The lines that lie in bytes start to stop of a JSON lines file: one document each, in the field `field`."""

    field: str

    def documents(self) -> Iterator[Document]:
        with open_bytes(self.path) as file:
            file.seek(self.start)
            at = self.start
            while (self.stop is None or at < self.stop) and (line := file.readline()):
                if line.strip():
                    yield Document(self._text(line, at))
                at += len(line)

    def _text(self, line: bytes, at: int) -> str:
        where = f"{self.path}, the line at byte {at},"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object but {line[:40]!r}")
        return text_of(record, self.field, where)


@dataclass(frozen=True)
class ParquetSlice:
    """Row groups of a parquet file: one document per row, in the column `field`."""

    path: Path
    groups: tuple[int, ...]
    size: int
    field: str

    def documents(self) -> Iterator[Document]:
        file = require("pyarrow.parquet", "lm").ParquetFile(self.path)
        for batch in file.iter_batches(batch_size=1024, row_groups=[*self.groups], columns=[self.field]):
            for text in batch.column(0).to_pylist():
                yield Document(text_of({self.field: text}, self.field, str(self.path)))


ADDRESS = "datasets:NAME[@REVISION][:CONFIG[:SPLIT]]"


@dataclass(frozen=True)
class DatasetSlice:
    """Part `index` of `count` of a data set that the `datasets` package reads (streaming, so nothing is kept)."""

    dataset: Dataset
    index: int
    count: int
    size: int = 0

    def documents(self) -> Iterator[Document]:
        for record in self.dataset.open().shard(num_shards=self.count, index=self.index):
            yield Document(text_of(record, self.dataset.field, str(self.dataset)))


@dataclass(frozen=True)
class Dataset:
    """A data set as ADDRESS names it."""

    name: str
    revision: str | None
    config: str | None
    split: str
    field: str

    PARTS = 1024
    """Most parts that a data set is cut into."""

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"datasets:{self.name}{revision}:{self.config or ''}:{self.split}"

    @classmethod
    def parse(cls, address: str, field: str) -> Dataset:
        """Read what follows `datasets:`."""
        name, *chosen = address.split(":")
        check(bool(name) and len(chosen) <= 2, "data", f"datasets:{address}", ADDRESS)
        config, split, *_ = [*chosen, "", ""]
        name, _, revision = name.partition("@")
        return cls(name, revision or None, config or None, split or "train", field)

    def open(self) -> Any:
        return open_dataset(self)

    def slices(self) -> list[DatasetSlice]:
        count = min(self.open().num_shards, self.PARTS)
        return [DatasetSlice(self, index, count) for index in range(count)]


@lru_cache(maxsize=4)
def open_dataset(dataset: Dataset) -> Any:
    """The streaming data set, cut as finely as its files allow (parquet files: by row group). Kept, because a worker
    reads many slices of it and opening asks the hub."""
    datasets = require("datasets", "lm")
    try:
        stream = datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, revision=dataset.revision, streaming=True
        )
    except Exception as error:  # the hub, the builder and the file system each raise their own
        raise ValueError(f"data={str(dataset)!r} cannot be opened: {error}") from error
    columns = stream.column_names
    if columns is not None:
        check_field(dataset.field, columns, str(dataset))
    return stream.reshard()


def text_slices(path: Path, part: int, stop: int | None = None, start: int = 0) -> list[TextSlice]:
    """A text file (or its bytes from start to stop) in slices of about `part` bytes, cut after line ends."""
    found = spans(path, part, start, stop)
    return [TextSlice(path, a, b, a == start, b == found[-1][1]) for a, b in found]


def lines_slices(path: Path, part: int, field: str) -> list[LinesSlice]:
    return [LinesSlice(path, a, b, field) for a, b in spans(path, part, whole_lines=True)]


def parquet_slices(path: Path, part: int, field: str) -> list[ParquetSlice]:
    file = require("pyarrow.parquet", "lm").ParquetFile(path)
    check_field(field, file.schema_arrow.names, str(path))
    slices: list[ParquetSlice] = []
    first, size = 0, 0
    for group in range(file.num_row_groups):
        size += file.metadata.row_group(group).total_byte_size
        if size >= part or group + 1 == file.num_row_groups:
            slices.append(ParquetSlice(path, tuple(range(first, group + 1)), size, field))
            first, size = group + 1, 0
    return slices


def spans(
    path: Path, part: int, start: int = 0, stop: int | None = None, whole_lines: bool = False
) -> list[tuple[int, int | None]]:
    """Bytes start to stop of a file in stretches of about `part`, cut after line ends; all of it where it is packed."""
    if path.suffix in PACKED_ENDINGS:
        return [(0, None)]
    stop = path.stat().st_size if stop is None else stop
    edges = [start]
    with path.open("rb") as file:
        while stop - edges[-1] > part:
            edge = after_line_end(file, edges[-1] + part, whole_lines)
            if edge >= stop:
                break
            edges.append(edge)
    return [*pairwise([*edges, stop])]


def after_line_end(file: IO[bytes], position: int, whole_lines: bool = False) -> int:
    """The first place from `position` on where a line begins, or at least a character where the line is endless."""
    file.seek(position - 1)
    if whole_lines:
        file.readline()
        return file.tell()
    ahead = file.read(LONG_LINE)
    line = ahead.find(b"\n") + 1
    if 0 < line < len(ahead):
        return position - 1 + line
    here = next(at for at in count(1) if not is_inside_character(ahead, at))
    return position - 1 + here


def pieces(file: IO[bytes], stop: int | None) -> Iterator[bytes]:
    """The bytes from here to `stop`, about PIECE at a time, cut after line ends (or characters, if a line is endless).

    It never goes back, which would be slow in a packed file."""
    left = float("inf") if stop is None else stop - file.tell()
    kept = b""
    while raw := file.read(int(min(PIECE, left))):
        left -= len(raw)
        kept += raw
        edge = kept.rfind(b"\n") + 1 or len(kept) - 1
        while edge and is_inside_character(kept, edge):
            edge -= 1
        yield kept[:edge]
        kept = kept[edge:]
    if kept:
        yield kept


def is_inside_character(raw: bytes, at: int) -> bool:
    """Does UTF-8 continue a character here?"""
    return at < len(raw) and 0x80 <= raw[at] < 0xC0


def open_bytes(path: Path) -> IO[bytes]:
    """A file for reading bytes, unpacked if its name ends in .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        try:
            zstd = importlib.import_module("compression.zstd")
        except ModuleNotFoundError:
            raise ValueError(f"{path} needs Python 3.14 or later; unpack it first: zstd -d {path}") from None
        return zstd.open(path, "rb")
    return path.open("rb")


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """The document in a record. Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes U+FFFD."""
    check_field(field, record, where)
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"text_field={field!r} holds {text!r:.40} and not a text in {where}")
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_field(field: str, fields: Sequence[str] | dict[str, Any], where: str) -> None:
    check(field in fields, "text_field", field, f"one of {', '.join(map(str, fields))}", f"is not in {where}")
