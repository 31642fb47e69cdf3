"""The paper's evaluation of language models: its tasks, shots and metrics, column by column of its table.

Task names and metrics are those of lm-evaluation-harness. The first block is the Open LLM Leaderboard, whose tasks the
harness has as `leaderboard_*`: groups of several tasks, except for MMLU-Pro and IFEval.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of the table: `metric` of `task`, evaluated with `shots` examples before the question."""

    title: str
    measure: str  # what the table's head calls the metric
    task: str
    metric: str
    shots: int = 0


LEADERBOARD = (
    Column("MMLU-P", "Acc", "leaderboard_mmlu_pro", "acc", shots=5),
    Column("GPQA", "Acc_n", "leaderboard_gpqa", "acc_norm"),
    Column("BBH", "Acc_n", "leaderboard_bbh", "acc_norm", shots=3),
    Column("MATH", "EM", "leaderboard_math_hard", "exact_match", shots=4),
    Column("MuSR", "Acc_n", "leaderboard_musr", "acc_norm"),
    Column("IFE-I", "strict", "leaderboard_ifeval", "inst_level_strict_acc"),
    Column("IFE-P", "strict", "leaderboard_ifeval", "prompt_level_strict_acc"),
)
GENERAL = (
    Column("ARC-C", "Acc_n", "arc_challenge", "acc_norm"),
    Column("ARC-E", "Acc_n", "arc_easy", "acc_norm"),
    Column("HS", "Acc_n", "hellaswag", "acc_norm"),
    Column("PIQA", "Acc_n", "piqa", "acc_norm"),
    Column("BoolQ", "Acc", "boolq", "acc"),
    Column("WinoG", "Acc", "winogrande", "acc"),
    Column("COPA", "Acc", "copa", "acc"),
    Column("OBQA", "Acc_n", "openbookqa", "acc_norm"),
    Column("SciQ", "Acc_n", "sciq", "acc_norm"),
)
BLOCKS = {"Open LLM Leaderboard": LEADERBOARD, "General Ability": GENERAL}
COLUMNS = (*LEADERBOARD, *GENERAL)

SUITES: dict[str, dict[str, int]] = {"paper": {column.task: column.shots for column in (*GENERAL, *LEADERBOARD)}}
"""Name of a suite -> tasks, the quick ones first, and their shots."""
