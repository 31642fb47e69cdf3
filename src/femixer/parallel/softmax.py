"""The softmax prior of a sequence that is cut over ranks: queries stay, keys and values come from the other ranks.

Either they go around a ring (ring.py), or they are gathered. What is kept for the backward is this rank's own keys and
values; those of the others come once more there. A window, which counts tokens, and a score bias are read gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.softmax import softmax_read
from femixer.layout import Layout
from femixer.parallel.cut import Cut
from femixer.parallel.ring import ring_read
from femixer.priors.base import Prior
from femixer.priors.softmax import SoftmaxPrior


class CutSoftmax(SoftmaxPrior):
    cut: Cut

    def gated_read(self, *given: Any) -> tuple[Tensor, Any]:
        return Prior.gated_read(self, *given)

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        q, k, v, beta = self._read_from(inputs, v, beta, layout)
        if q.shape[0] == 0 or q.shape[1] == 0:
            nothing = q.new_zeros(*q.shape[:-1], v.shape[-1])
            return nothing, None if beta is None else nothing, None
        if self.cut.ring and self.window is None and self.score_bias is None:
            return *ring_read(q, k, v, beta, layout.segment, self.cut, self.causal), None
        keys, values = (self.cut.whole_of_folded(x) for x in (k, v))
        segment = None if layout.segment is None else self.cut.whole_of_folded(layout.segment)
        position = None if self.score_bias is None else self.cut.whole_of_folded(layout.position)
        reads = []
        with torch.autograd.graph.saved_tensors_hooks(*_gathered_again(self.cut, (k, v), (keys, values))):
            for number, place in enumerate(self.cut.places):
                # rows of one stretch
                rows, key = self.cut.one_of_folded(q, number), self.cut.one_of_folded(layout.position, number)
                reads.append(self._read_stretch(rows, key, place, (keys, values, segment, position), beta))
        means, frees = zip(*reads, strict=True)
        free = None if beta is None else self.cut.of_stretches([*frees])
        return self.cut.of_stretches([*means]), free, None

    def _read_stretch(
        self,
        q: Tensor,
        places: Tensor,
        place: int,
        whole: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        beta: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mean and free energy of queries q [B, T, H, E] that stand at `places` [B or 1, T], stretch number `place` of
        the sequence with these keys, values, segments and positions."""
        length, keys = q.shape[1], whole[0].shape[1]
        # Operators take queries to be the last of the tokens. Queries of an encoder see later ones too, and where a
        # window counts tokens empty queries stand in for those.
        missing = keys - (place + 1) * length if not self.causal and self.window is not None else 0
        seen = (place + 1) * length if self.causal else keys
        k, v, segment, position = (None if x is None else x[:, :seen] for x in whole)
        assert k is not None and v is not None
        segments = None
        if segment is not None:
            segments = (segment[:, place * length : place * length + length + missing], segment)
        bias = None
        if position is not None:
            bias = self._bias(F.pad(places, (0, missing)), position, q.dtype)
        q = F.pad(q, (0, 0, 0, 0, 0, missing))
        mean, free = softmax_read(q, k, v, beta, causal=self.causal, window=self.window, bias=bias, segments=segments)
        return mean[:, :length], None if free is None else free[:, :length]


def _gathered_again(
    cut: Cut, own: tuple[Tensor, ...], wholes: tuple[Tensor, ...]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that keep, instead of a view of one of `wholes`, only which it is: it is gathered from `own` again."""
    held = [x.untyped_storage().data_ptr() for x in wholes]
    own = tuple(x.detach() for x in own)

    def pack(x: Tensor) -> Any:
        storage = x.untyped_storage().data_ptr()
        if storage not in held:
            return x
        return held.index(storage), x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, *view = kept
        with torch.no_grad():
            return cut.whole_of_folded(own[number]).as_strided(*view)

    return pack, unpack
