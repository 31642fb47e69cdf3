"""Training: one loop for one process or many, checkpoints that survive any crash, and a results folder per run."""

from femixer.training import distributed
from femixer.training.distributed import Interrupted, Part
from femixer.training.engine import EngineOptions, full_weights
from femixer.training.loop import Fit, TrainOptions, adamw, constant, cosine, train
from femixer.training.results import Results, RunOptions, show_table
from femixer.training.seeding import derive, generator

__all__ = [
    "EngineOptions",
    "Fit",
    "Interrupted",
    "Part",
    "Results",
    "RunOptions",
    "TrainOptions",
    "adamw",
    "constant",
    "cosine",
    "derive",
    "distributed",
    "full_weights",
    "generator",
    "show_table",
    "train",
]
