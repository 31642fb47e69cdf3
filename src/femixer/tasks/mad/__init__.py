"""The MAD benchmark (Poli et al., 2024, arXiv:2403.17844): six synthetic tasks that small models learn or do not.

`TASKS` has their defaults and sweeps, `sample` their data. The tasks are those of the public code, athms/mad-lab, as it
really runs.
"""

from femixer.tasks.mad.data import IGNORE, TASKS, MadTask, sample
from femixer.tasks.runner import Task

STUDY = Task(
    "mad study",
    format=1,
    run="femixer.tasks.mad.study:StudyRun",
    run_help="how early variants of the mixer learn a task",
    table_help="when each variant has learned, over seeds",
)
SCORES = {"accuracy": float, "loss": ("number", None)}  # that of a training which diverged may be NaN
RECORD = {
    **dict.fromkeys(("model", "task", "protocol"), str),
    **dict.fromkeys(("seed", "steps", "parameter_count"), int),
    **dict.fromkeys(("lr", "weight_decay"), float),
    "parameters": dict,
    "training?": dict,
    "evaluations": [{"step": int, "validation": SCORES, "test": SCORES}],
    "environment": {"femixer": str},
}
TASK = Task(
    "mad",
    format=1,
    run="femixer.tasks.mad.task:MadRun",
    table="femixer.tasks.mad.table:MadTabulate",
    run_help="train models on the tasks, here or on a cluster",
    others={"study": (STUDY.main, "what decides how early a mixer learns: run, table, export")},
    record=RECORD,
)
main = TASK.main

__all__ = ["IGNORE", "TASK", "TASKS", "MadTask", "main", "sample"]
