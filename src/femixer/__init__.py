"""Free Energy Mixer: attention, linear attention and state-space priors with a per-channel free-energy read."""

from femixer.free_energy import (
    effective_weights,
    free_energy,
    hidden_temperature,
    posterior,
    posterior_mean,
    temperature_for_budget,
)
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
]
