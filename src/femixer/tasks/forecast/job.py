"""One job: a model trained on one data set, for one horizon, with one seed."""

from __future__ import annotations

from dataclasses import dataclass

from femixer.tasks.forecast.experiment import Spec
from femixer.tasks.forecast.fitting import fitted
from femixer.tasks.forecast.source import Reading, read
from femixer.training import Results, RunOptions
from femixer.training.jobs.job import OfSpec
from femixer.training.results import Record


@dataclass(frozen=True)
class Job(OfSpec):
    """A training, and where its data are; the latter may differ from machine to machine."""

    spec: Spec
    data: str
    reading: Reading

    def carry_out(self, options: RunOptions) -> Record:
        options.apply()
        series = read(self.data, self.reading)
        if series.fingerprint != self.spec.fingerprint:
            raise ValueError(f"data={self.data!r} has changed since the job was made")
        return fitted(self.spec, series, Results("forecast", self.spec, options)).record

    def summary(self, record: Record) -> str:
        return f"test MSE {record['mse']:.4f} MAE {record['mae']:.4f} of step {record['best_step']}"
