"""The other mixers of the paper's tables, with FreeEnergyMixer's signature."""

from femixer.baselines.attention import (
    Attention,
    Cache,
    DiffTransformer,
    FoX,
    FoXMemory,
    GatedAttention,
    Laser,
    PaTH,
    PaTHMemory,
)
from femixer.baselines.base import Baseline, Memory
from femixer.baselines.deltanet import KDA, DeltaNet, GatedDeltaNet
from femixer.baselines.linear_attention import AFT, GLA, GSA, HGRN, HGRN2, LinearAttention, RetNet, Slots
from femixer.baselines.long_convolution import TNN, Hyena, HyenaMemory, TNNMemory
from femixer.baselines.mamba import Mamba, Mamba2
from femixer.baselines.rwkv import RWKV6, RWKV7
from femixer.trees import register_tuple

for kind in (Cache, FoXMemory, HyenaMemory, Memory, PaTHMemory, Slots, TNNMemory):
    register_tuple(kind)

BASELINES: dict[str, type[Baseline]] = {
    "attention": Attention,
    "aft": AFT,
    "deltanet": DeltaNet,
    "diff-transformer": DiffTransformer,
    "fox": FoX,
    "gated-attention": GatedAttention,
    "gated-deltanet": GatedDeltaNet,
    "gla": GLA,
    "gsa": GSA,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
    "hyena": Hyena,
    "kda": KDA,
    "laser": Laser,
    "linear-attention": LinearAttention,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "path": PaTH,
    "retnet": RetNet,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "tnn": TNN,
}
"""By the names of `FEMConfig.mixer`."""

__all__ = [
    "AFT",
    "BASELINES",
    "GLA",
    "GSA",
    "HGRN",
    "HGRN2",
    "KDA",
    "RWKV6",
    "RWKV7",
    "TNN",
    "Attention",
    "Baseline",
    "DeltaNet",
    "DiffTransformer",
    "FoX",
    "GatedAttention",
    "GatedDeltaNet",
    "Hyena",
    "Laser",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "PaTH",
    "RetNet",
]
