"""What a job is to those who carry it out."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import Any, Protocol

from femixer.training.results import Record, RunOptions


class Job(Protocol):
    """One training, defined by its fields; it travels to other processes, so it must be possible to pickle it."""

    @property
    def digest(self) -> str:
        """A hash of everything that decides the numbers."""

    @property
    def title(self) -> str:
        """For people."""

    @property
    def name(self) -> str:
        """Of its files: the title and the digest."""

    def carry_out(self, options: RunOptions) -> Record:
        """Train in the folder of `options`, from the checkpoint there if there is one: the record of the store."""

    def summary(self, record: Record) -> str:
        """What came out, in a few words."""


class OfSpec:
    """The names of a job that a `spec`, a dataclass with a title, defines."""

    spec: Any

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.spec)

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def name(self) -> str:
        return f"{self.title} {self.digest}"


def digest_of(definition: Any) -> str:
    """A hash of the fields of a dataclass."""
    return hashlib.sha256(json.dumps(asdict(definition), sort_keys=True).encode()).hexdigest()[:16]
