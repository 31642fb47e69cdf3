"""Rivals as encoders: TNN, HGRN and HGRN2 against their definitions. What all encoders keep is in test_baselines.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from matrix import assert_close, noise, outcome, stir, tokens
from published import rms
from torch import Tensor

from femixer.baselines import BASELINES, HGRN, HGRN2, TNN
from femixer.models import FEMForImageClassification, FEMVisionConfig
from femixer.tasks.vision.model import ENCODERS as ROWS

EXACT = 1e-10


@pytest.mark.parametrize("name", ["hgrn", "hgrn2", "tnn"])
def test_a_reversed_sequence_is_read_in_reverse(name: str):
    """The recurrences are the same both ways; the Toeplitz coefficients are not."""
    m, x = stir(BASELINES[name](24, 4, causal=False, dtype=torch.float64)), tokens()
    same = torch.allclose(m(x.flip(1)).flip(1), m(x), atol=1e-9)
    assert same == (name != "tnn")


def hgrn(m: HGRN, x: Tensor) -> Tensor:
    c, f, g = m.in_proj(x).split((m.width, m.width, m.width), -1)
    f, c = m.lower_bound + (1 - m.lower_bound) * f.sigmoid(), F.silu(c)
    h = torch.zeros_like(c)
    for order in (range(x.shape[1]), range(x.shape[1] - 1, -1, -1)):
        state = torch.zeros_like(c[:, 0])
        for t in order:
            state = f[:, t] * state + (1 - f[:, t]) * c[:, t]
            h = h + F.pad(state[:, None], (0, 0, t, x.shape[1] - 1 - t))
    return m.out_proj(rms(h, m.norm.weight) * F.silu(g))


def hgrn2(m: HGRN2, x: Tensor) -> Tensor:
    q, f, i = (part.unflatten(-1, (m.heads, -1)) for part in m.in_proj(x).chunk(3, -1))
    q, f = F.silu(q) * q.shape[-1] ** -0.5, m.lower_bound + (1 - m.lower_bound) * f.sigmoid()
    h = torch.zeros_like(i)
    for order in (range(x.shape[1]), range(x.shape[1] - 1, -1, -1)):
        state = x.new_zeros(x.shape[0], m.heads, q.shape[-1], q.shape[-1])
        for t in order:
            state = f[:, t, :, :, None] * state + (1 - f[:, t])[..., None] * i[:, t, :, None]
            read = torch.einsum("bhed,bhe->bhd", state, q[:, t])
            h = h + F.pad(read[:, None], (0, 0, 0, 0, t, x.shape[1] - 1 - t))
    return m.out_proj(rms(h.flatten(2), m.norm.weight))


def tnn(m: TNN, x: Tensor) -> Tensor:
    u, v = F.silu(m.in_proj(x)).chunk(2, -1)
    length, rpe = x.shape[1], m.coefficients

    def coefficient(n: int) -> Tensor:
        z = n * rpe.first.weight[:, 0] + rpe.first.bias
        for linear in (*rpe.layers, rpe.last):
            z = linear((z / (z.square().mean() + 1e-6).sqrt()).clamp(min=0))
        return rpe.decay ** abs(n) * z

    matrix = [[coefficient(t - i) if i <= t or not m.causal else 0 for i in range(length)] for t in range(length)]
    read = torch.stack([sum(matrix[t][i] * v[:, i] for i in range(length)) for t in range(length)], 1)
    return m.out_proj(u * read)


@pytest.mark.parametrize(
    ("kind", "options", "published"),
    [
        (HGRN, {"causal": False, "lower_bound": 0.2}, hgrn),
        (HGRN2, {"causal": False, "lower_bound": 0.2}, hgrn2),
        (TNN, {"causal": False}, tnn),
        (TNN, {"causal": True, "expand": 2.0, "rpe_width": 5, "layers": 1, "decay": 0.9, "bias": True}, tnn),
    ],
)
def test_the_layer_is_its_definition(kind: type, options: dict, published):
    m, x = stir(kind(12, 3, dtype=torch.float64, **options)), noise(2, 9, 12)
    assert_close(outcome(m, m, x), outcome(m, lambda x: published(m, x), x), EXACT)


def test_the_rows_of_the_vision_table_are_models():
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    for row in ("TNN", "HGRN", "HGRN2"):
        model = FEMForImageClassification(FEMVisionConfig(**sizes, **ROWS[row]))
        assert model(noise(2, 3, 8, 8).float()).logits.isfinite().all()
        with pytest.raises(StrictDataclassError, match=f"positions='rotary' does not fit mixer='{row.lower()}'"):
            FEMVisionConfig(**sizes, **ROWS[row], positions="rotary")
