"""Many independent trainings as jobs: here or on a cluster, their records in a store that any number may write to."""

from femixer.training.jobs.engines import Engine
from femixer.training.jobs.job import Job
from femixer.training.jobs.running import Jobs, divided, run
from femixer.training.jobs.store import Kind, Store, export, load

__all__ = ["Engine", "Job", "Jobs", "Kind", "Store", "divided", "export", "load", "run"]
