"""Training: one loop, checkpoints that survive a crash at any instant, and a results folder per run."""

from femixer.training.interrupt import Interrupted
from femixer.training.loop import train
from femixer.training.optimizer import adamw
from femixer.training.results import Results, RunOptions, show_table
from femixer.training.seeding import generator

__all__ = ["Interrupted", "Results", "RunOptions", "adamw", "generator", "show_table", "train"]
