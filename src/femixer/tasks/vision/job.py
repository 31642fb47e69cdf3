"""One job: a model trained on one set of pictures with one seed."""

from __future__ import annotations

from dataclasses import dataclass

from femixer.tasks.vision.experiment import Spec
from femixer.tasks.vision.fitting import Loading, fitted
from femixer.tasks.vision.source import Reading, read
from femixer.training import Results, RunOptions
from femixer.training.jobs.job import OfSpec
from femixer.training.results import Record


@dataclass(frozen=True)
class Job(OfSpec):
    """A training, and where its pictures are; the latter may differ from machine to machine."""

    spec: Spec
    data: str
    reading: Reading
    loading: Loading

    def carry_out(self, options: RunOptions) -> Record:
        options.apply()
        images = read(self.data, self.reading, self.spec.fields["num_channels"])
        if images.fingerprint != self.spec.fingerprint:
            raise ValueError(f"data={self.data!r} has changed since the job was made")
        return fitted(self.spec, images, Results("vision", self.spec, options), self.loading).record

    def summary(self, record: Record) -> str:
        return f"test accuracy {record['top1']:.2%} (validation {record['validation_top1']:.2%})"
