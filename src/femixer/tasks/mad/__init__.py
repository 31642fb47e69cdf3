"""The MAD benchmark (Poli et al., 2024, arXiv:2403.17844): six synthetic tasks that small models learn or do not.

`TASKS` has their defaults and sweeps, `sample` their data. The tasks are those of the public code, athms/mad-lab, as it
really runs.
"""

from femixer.tasks.mad.draw import IGNORE
from femixer.tasks.mad.sampling import sample
from femixer.tasks.mad.task import TASKS, Task

__all__ = ["IGNORE", "TASKS", "Task", "sample"]
