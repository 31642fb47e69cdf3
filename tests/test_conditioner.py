"""The time-decay conditioner (part C): definition, segments, padding, encoder mode, initial spans."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matrix import SEGMENTS, assert_close, noise, segments_of, stir, tokens
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.conditioner import TimeDecayConditioner
from femixer.kernels.conditioner import plain
from femixer.layout import Layout, Past, arrange


def layout_of(x: Tensor, **given: Tensor) -> Layout:
    return arrange(x, given.get("mask"), given.get("segments"), Past())[0]


def double_sum(decay: Tensor, u: Tensor, ids: Tensor, causal: bool) -> Tensor:
    """sum_i K(t, i) u_i over the real tokens of t's segment, K from the definition: gates i+1..t back, t..i-1 ahead."""
    h = torch.zeros_like(u)
    for row, row_ids in enumerate(ids.tolist()):
        for segment in segments_of(row_ids):
            a, inputs = decay[row, segment], u[row, segment]
            for t in range(len(segment)):
                total = sum(a[i + 1 : t + 1].prod(0) * inputs[i] for i in range(t + 1))
                if not causal:
                    total = total + sum(a[t:i].prod(0) * inputs[i] for i in range(t + 1, len(segment)))
                h[row, segment[t]] = total
    return h


def context(s: Tensor, u: Tensor, layout: Layout, causal: bool) -> Tensor:
    """sum_i K(t, i) u_i over earlier tokens and the token itself, and over later ones if not causal; s: logits."""
    *_, sums = plain.forward(torch.cat([s, u, torch.zeros_like(u)], -1), layout.marks(), None, causal, 1e-5)
    return sums if causal else sum(sums.chunk(2, -1))


class TestContext:
    @pytest.mark.parametrize("causal", [True, False])
    def test_the_kernel_of_the_module_is_rank_one_in_time(self, causal: bool):
        """K(t, i) = phi_t / phi_i: every 2 x 2 minor of the past is zero; its logarithm is a sum of -softplus gates."""
        torch.manual_seed(0)
        module = TimeDecayConditioner(12, 2, causal, dtype=torch.float64)
        x = tokens(batch=1, length=9, dim=12)
        s, u, _ = module.in_proj(F.layer_norm(x, (12,))).detach().chunk(3, -1)
        gate = F.softplus(s)[0]
        jacobian = torch.autograd.functional.jacobian(lambda u: context(s, u, layout_of(x), causal), u)[0, :, :, 0]
        for c in range(2):
            kernel = jacobian[:, c, :, c]
            assert jacobian[:, c, :, 1 - c].count_nonzero() == 0
            for t in range(9):
                for i in range(9):
                    if i <= t:
                        wanted = math.exp(-gate[i + 1 : t + 1, c].sum())
                    else:
                        wanted = 0.0 if causal else math.exp(-gate[t:i, c].sum())
                    assert kernel[t, i].item() == pytest.approx(wanted, abs=1e-14)
            past = kernel[5:, :5]
            assert torch.linalg.svdvals(past)[1] < 1e-14


class TestModule:
    def plain(self, module: TimeDecayConditioner, x: Tensor, ids: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        s, u, a = (normal @ module.in_proj.weight.T + module.in_proj.bias).chunk(3, -1)
        decay = torch.exp(-torch.log1p(s.exp()))
        h = double_sum(decay, u, ids, module.causal)
        h = h - h.mean(-1, keepdim=True)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        a = torch.log1p(a.exp())
        direction = a / a.norm(dim=-1, keepdim=True)
        return direction * torch.sigmoid(direction) * h

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("channels", [4, 5, 9])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
    def test_features_are_their_formula(self, causal: bool, channels: int, dtype: torch.dtype, tolerance: float):
        module = TimeDecayConditioner(12, channels, causal, dtype=torch.float64)
        with torch.no_grad():
            module.in_proj.weight.copy_(0.3 * noise(3 * channels, 12))
            module.in_proj.bias.add_(0.3 * noise(3 * channels, seed=1))
        x = tokens(dim=12) + 3  # what is normalized may lie away from zero
        wanted, real = self.plain(module, x, SEGMENTS), SEGMENTS >= 0
        features, _ = module.to(dtype)(x.to(dtype), layout_of(x, segments=SEGMENTS))
        assert_close({"features": features[real]}, {"features": wanted[real]}, tolerance)

    def test_the_state_does_not_grow(self):
        m = FreeEnergyMixer(64, 2)
        sizes = [m(torch.zeros(3, t, 64), return_state=True)[1].conditioner.shape for t in (1, 5, 500)]
        assert set(sizes) == {(3, m.conditioner.channels)}

    @pytest.mark.parametrize("channels", [4, 24, 48])
    def test_initial_spans_are_spread_from_2_to_1000_tokens(self, channels: int):
        module = TimeDecayConditioner(12, channels)
        spans = 1 / F.softplus(module.in_proj.bias.detach().double()[:channels])
        assert spans.min().item() == pytest.approx(2, rel=1e-3)
        assert spans.max().item() == pytest.approx(1000, rel=1e-3)
        ratios = spans[1:] / spans[:-1]
        assert ratios.max() / ratios.min() < 1.01
        assert module.in_proj.bias[channels:].count_nonzero() == 0

    def test_a_token_fades_by_1_over_e_in_its_span(self):
        """The span is what a channel remembers of a token whose gates are at their bias."""
        module = TimeDecayConditioner(8, 4, dtype=torch.float64)
        with torch.no_grad():
            module.in_proj.weight.zero_()
            module.in_proj.bias[4:8] = 1
        x = torch.zeros(1, 1, 8, dtype=torch.float64)
        _, first = module(x, layout_of(x))
        keep = torch.zeros(1, 1000, 8, dtype=torch.float64)
        with torch.no_grad():
            module.in_proj.bias[4:8] = 0
        _, last = module(keep, layout_of(keep), first)
        assert (last / first)[0, -1].item() == pytest.approx(math.exp(-1), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_recurrence_is_float32_under_autocast(self, dtype: torch.dtype):
        module = TimeDecayConditioner(12, 5)
        x = tokens(dim=12, dtype=torch.float32)
        with torch.autocast("cpu", dtype):
            features, state = module(x, layout_of(x))
        assert state.dtype == torch.float32
        wanted, _ = module(x, layout_of(x))
        assert_close({"features": features}, {"features": wanted}, 0.05)

    def test_conditioned_channels_differ_from_unconditioned_ones(self):
        """The modulation reaches every projection: without it the output is another one."""
        m, x = stir(FreeEnergyMixer(24, 3, dtype=torch.float64)), tokens()
        for projection in (m.prior_proj, m.value_proj):
            for columns in projection.modulation.detach().split([c.width for c in projection.columns.values()]):
                before = m(x)
                kept = columns.clone()
                columns.zero_()
                assert (m(x)[:, 1:] - before[:, 1:]).abs().amax(-1).min() > 1e-6
                columns.copy_(kept)
