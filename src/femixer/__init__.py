"""Free Energy Mixer: attention, linear attention and state-space priors with a per-channel free-energy read."""

import os
import sys

# OpenMP's idle threads spin for milliseconds by default. Beside any other busy process (a data loader is enough) they
# take the cores from those that work: a training step is then two to three times slower. Sleeping threads cost nothing
# measurable on an idle machine. The runtime reads this when torch is loaded; who loads torch first may set it itself.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from femixer import trees as trees
from femixer.free_energy import (
    effective_weights,
    free_energy,
    hidden_temperature,
    posterior,
    posterior_mean,
    temperature_for_budget,
)
from femixer.kernels.dispatch import use_backend
from femixer.mixer import FreeEnergyMixer

__version__ = "0.1.0"

__all__ = [
    "FreeEnergyMixer",
    "effective_weights",
    "free_energy",
    "hidden_temperature",
    "posterior",
    "posterior_mean",
    "temperature_for_budget",
    "use_backend",
]
