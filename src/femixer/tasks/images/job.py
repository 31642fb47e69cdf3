"""One job: a model trained on one set of pictures with one seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from femixer.tasks.images.experiment import Spec
from femixer.tasks.images.fitting import Loading, fitted
from femixer.tasks.images.source import Reading, read
from femixer.training import Results, RunOptions
from femixer.training.jobs.job import digest_of
from femixer.training.results import Record


@dataclass(frozen=True)
class Job:
    """A training, and where its pictures are; the latter may differ from machine to machine."""

    spec: Spec
    data: str
    reading: Reading
    loading: Loading

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.spec)

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def name(self) -> str:
        return f"{self.title} {self.digest}"

    def carry_out(self, options: RunOptions) -> Record:
        options.apply()
        images = read(self.data, self.reading, self.spec.fields["num_channels"])
        if images.fingerprint != self.spec.fingerprint:
            raise ValueError(f"data={self.data!r} has changed since the job was made")
        return fitted(self.spec, images, Results("vision", self.spec, options), self.loading).record

    def summary(self, record: Record) -> str:
        return f"test accuracy {record['top1']:.2%} (validation {record['validation_top1']:.2%})"
