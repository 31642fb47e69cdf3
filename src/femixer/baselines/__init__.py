"""The other mixers of the paper's tables, with FreeEnergyMixer's signature."""

from femixer.baselines import attention, convolution, fox, gsa, hyena, path, tnn
from femixer.baselines.aft import AFT
from femixer.baselines.attention import Attention, GatedAttention, Laser
from femixer.baselines.base import Baseline
from femixer.baselines.deltanet import KDA, DeltaNet, GatedDeltaNet
from femixer.baselines.diff_transformer import DiffTransformer
from femixer.baselines.fox import FoX
from femixer.baselines.gsa import GSA
from femixer.baselines.hgrn import HGRN, HGRN2
from femixer.baselines.hyena import Hyena
from femixer.baselines.linear_attention import GLA, LinearAttention, RetNet
from femixer.baselines.mamba import Mamba, Mamba2
from femixer.baselines.path import PaTH
from femixer.baselines.rwkv import RWKV6, RWKV7
from femixer.baselines.tnn import TNN
from femixer.trees import register_tuple

for kind in (attention.Cache, *(each.Memory for each in (convolution, fox, gsa, hyena, path, tnn))):
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
