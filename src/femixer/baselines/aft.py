"""The attention free transformer: every channel averages the past with weights of its own."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, made_with
from femixer.kernels.channel_scan import channel_scan
from femixer.layout import Layout


class AFT(Baseline):
    """y_t = [sigmoid(q_t) * sum_{i<=t} exp(k_i) v_i / sum_{i<=t} exp(k_i)] W_o, per channel: AFT-simple.

    The form without position biases, as in the paper's comparison (its prior "LRNN-softmax"); AFT-full and AFT-local
    add learned biases of a fixed length. Exact for keys of any size. 4 dim² parameters, no use of heads.
    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, dim: int, heads: int, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v = self.in_proj(x).chunk(3, -1)
        dtype = torch.promote_types(v.dtype, torch.float32)
        # The scan has its three rows first; a state has the batch first.
        state = None if memory is None else memory.transpose(0, 1)
        read = channel_scan(k.to(dtype), None, v.to(dtype), None, layout.marks(), state)
        y = self.out_proj(self.dropout((q.sigmoid() * read.mean).to(x.dtype)))
        return y, read.state.transpose(0, 1) if keep else None
