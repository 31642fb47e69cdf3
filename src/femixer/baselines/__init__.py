"""The other mixers of the paper's tables, with FreeEnergyMixer's signature."""

from femixer.baselines.attention import Attention

__all__ = ["Attention"]
