"""Every prior in float32 and below against its float64 definition, at tame and at wild values (see matrix.py)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from matrix import (
    HEADS,
    LENGTH,
    ROUNDING,
    Variant,
    assert_close,
    assert_gradient,
    outcome,
    plain_mixer,
    reads_of,
    tokens,
    variants,
)
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors.base import DirectedPrior
from femixer.priors.fox import FoxPrior


def value_patterns(kind: str, length: int, beta: Tensor) -> dict[str, Tensor]:
    """Values [length, G] by name for temperatures beta [G, patterns]; `wild` ones have |beta v| up to 1e4."""
    groups = beta.shape[0]
    noise = torch.randn(length, groups, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    ramp = torch.linspace(-1, 1, length, dtype=torch.float64)[:, None].expand(-1, groups)
    signs = 1 - 2 * (torch.arange(length, dtype=torch.float64) % 2)[:, None].expand(-1, groups)
    ones = torch.ones_like(ramp)
    if kind == "tame":
        return {
            "noise": noise,
            "small noise": 1e-3 * noise,
            "large noise": 10 * noise,
            "ramp": 5 * ramp,
            "signs": signs,
            "offset": noise + 100,
            "constant": 3.7 * ones,
        }
    giant = (torch.arange(length) == length * 3 // 4)[:, None]
    size = 1e4 / beta.double()
    return {
        "noise": size[:, 0] * noise / noise.abs().max(),
        "rising": size[:, 1] * ramp,
        "falling": -size[:, 2] * ramp,
        "one giant": torch.where(giant, size[:, 3] * ones, noise),
        "signs": size[:, 4] * signs,
        "offset": size[:, 5] * (1 + 1e-4 * noise),
        "constant": size[:, 6] * ones,
    }


READS = ("L", "channelL", "grouped", "window", "alibi", "norope")


class TestExactness:
    """Float32 against the float64 oracle. Tame values stay on the fast path, wild ones do not."""

    WIDTH = 7  # value channels per head: one per pattern
    ROWS = 71  # of the gradient test: more than a chunk or a block

    def setup_read(self, variant: Variant, kind: str, causal: bool, length: int):
        m = variant.build(
            dim=48, heads=HEADS, dtype=torch.float32, causal=causal, parts="L", value_dim=HEADS * self.WIDTH
        )
        # Half the usual size: scores up to about 8. Larger ones carry float32's rounding of q k into p.
        x = 0.5 * tokens(batch=1, length=length, dim=48, dtype=torch.float32)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(x)
        groups = v.shape[2]
        order = torch.randperm(groups * self.WIDTH, generator=torch.Generator().manual_seed(13))
        beta = torch.logspace(-1.69, 1, groups * self.WIDTH)[order].view(groups, self.WIDTH)
        if m.prior.one_temperature:
            beta = beta[:, :1].expand(-1, self.WIDTH)
        patterns = value_patterns(kind, length, beta)
        v = torch.stack(list(patterns.values()), -1)[None].float()
        return m, inputs, v, beta, layout, list(patterns)

    @staticmethod
    def visible_extent(m: FreeEnergyMixer, p: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Largest value over the support, [B, rows, H, D]; a decayed weight may be too small for float64."""
        v = v.repeat_interleave(p.shape[1] // v.shape[2], 2).transpose(1, 2)[:, :, None]
        if m.prior.one_temperature:  # all channels of the head compete
            v = v.amax(-1, keepdim=True).expand(*v.shape)
        support = p > 0 if p.dim() == 5 else (p > 0)[..., None]
        if isinstance(m.prior, (DirectedPrior, FoxPrior)):
            support = (torch.arange(p.shape[3]) <= rows[:, None])[..., None] if m.causal else torch.ones_like(support)
        return torch.where(support, v, -torch.inf).amax(-2).transpose(1, 2)

    @variants(*READS)
    @pytest.mark.parametrize("kind", ["tame", "wild"])
    @pytest.mark.parametrize(("causal", "length"), [(True, 1025), (True, 101), (False, 400)])
    def test_mean_and_free_energy_are_exact(self, variant: Variant, kind: str, causal: bool, length: int):
        self.check_reads(variant, kind, causal, length)

    @variants("L", "window")
    def test_mean_and_free_energy_are_exact_at_4096_tokens(self, variant: Variant):
        self.check_reads(variant, "wild", True, 4096)

    def check_reads(self, variant: Variant, kind: str, causal: bool, length: int) -> None:
        m, inputs, v, beta, layout, _ = self.setup_read(variant, kind, causal, length)
        mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
        rows = torch.tensor(
            sorted({0, 1, 2, length // 3, length * 3 // 4 - 1, length * 3 // 4, length - 2, length - 1})
        )
        weights = m.prior.weights(inputs, layout, rows)
        wanted_mean, wanted = reads_of(weights, m.prior.over_index(v.double()), beta.double())
        top = self.visible_extent(m, m.prior.over_tokens(weights), v.double(), rows)
        repeats = HEADS // beta.shape[0]
        temperature = beta.double().repeat_interleave(repeats, 0)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        mean, free = mean[:, rows].double(), free[:, rows].double()
        rounding = 1e-6 * torch.maximum(top.abs(), wanted.abs()).clamp(min=1)
        assert (mean <= free + rounding).all()
        assert (free <= top + rounding).all()
        size = v.double().abs().amax(1).repeat_interleave(repeats, 1)[:, None]
        if m.prior.one_temperature:
            size = size.amax(-1, keepdim=True)
        assert ((mean - wanted_mean).abs() <= 1e-5 * size).all()
        within_sight = (temperature >= 0.02) & (temperature * (top - wanted) <= 60)
        assert within_sight.float().mean() > 0.5
        error = (free - wanted).abs() / wanted.abs().clamp(min=1)
        assert error[within_sight].max() <= 1e-5

    def gradients(
        self, variant: Variant, kind: str, causal: bool
    ) -> Iterator[tuple[str, Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]]:
        """For each pattern: its name, largest |v| [G], beta [G], and (gradient, oracle's gradient) by name."""
        m, inputs, v, beta, layout, patterns = self.setup_read(variant, kind, causal, self.ROWS)
        names = [*inputs, "v", "beta"]
        leaves = [leaf.requires_grad_() for leaf in (*inputs.values(), v, beta)]
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wide_inputs = dict(zip(inputs, wide, strict=False))
        weights = m.prior.weights(wide_inputs, layout)
        wanted_mean, wanted = reads_of(weights, m.prior.over_index(wide[-2]), wide[-1])
        mean, free, _ = m.prior.read(inputs, v, beta, layout, None, False)
        with torch.no_grad():
            top = self.visible_extent(m, m.prior.over_tokens(weights), wide[-2], torch.arange(self.ROWS))
        temperature = wide[-1].repeat_interleave(HEADS // beta.shape[0], 0)
        within_sight = (temperature * (top - wanted) <= 60).double()
        for channel, pattern in enumerate(patterns):
            cotangent = torch.randn(free.shape, generator=torch.Generator().manual_seed(channel), dtype=torch.float64)
            cotangent = cotangent * within_sight
            cotangent[..., :channel] = cotangent[..., channel + 1 :] = 0
            actual = torch.autograd.grad(((free + mean) * cotangent.float()).sum(), leaves, retain_graph=True)
            expected = torch.autograd.grad(((wanted + wanted_mean) * cotangent).sum(), wide, retain_graph=True)
            if m.prior.one_temperature:  # only all channels' together are one temperature's gradient
                actual, expected = ((*grads[:-1], grads[-1].sum(-1)) for grads in (actual, expected))
            size = v.detach()[0, ..., channel].abs().amax(0)
            if m.prior.one_temperature:
                size = v.detach()[0].abs().amax((0, 2))
            yield (
                pattern,
                size,
                beta.detach()[:, channel],
                dict(zip(names, zip(actual, expected, strict=True), strict=True)),
            )

    @variants(*READS)
    @pytest.mark.parametrize(("kind", "causal"), [("tame", True), ("wild", True), ("wild", False)])
    def test_gradients_are_exact(self, variant: Variant, kind: str, causal: bool):
        for pattern, size, beta, gradients in self.gradients(variant, kind, causal):
            for name, (actual, expected) in gradients.items():
                assert_gradient(f"{name}, {pattern}", actual, expected, size, beta, self.ROWS)


class TestLowPrecision:
    @staticmethod
    def errors(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> dict[str, float]:
        """Root mean square by name; infinite for a NaN, which plain float16 has in its gradients."""
        result = {}
        for name in expected[0]:
            differences = torch.stack([a[name].double() - e[name] for a, e in zip(actual, expected, strict=True)])
            error = differences.square().mean().sqrt().item()
            result[name] = math.inf if math.isnan(error) else error
        return result

    @variants("CLTG", "mean", "grouped", "window", "alibi")
    @pytest.mark.parametrize(
        ("dtype", "causal"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
    )
    def test_autocast_is_as_good_as_plain_torch_under_it(self, variant: Variant, dtype: torch.dtype, causal: bool):
        exact = variant.build(causal=causal)
        m = copy.deepcopy(exact).float()

        def low(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype):
                    return forward(x).float()

            return run

        inputs = [tokens(seed=seed) for seed in range(5)]
        wanted = [outcome(exact, exact, x) for x in inputs]
        ours = [outcome(m, low(m), x.float()) for x in inputs]
        plain = [outcome(m, low(lambda x: plain_mixer(m, x, torch.float32)), x.float()) for x in inputs]
        assert all(value.isfinite().all() for result in ours for value in result.values())
        errors, allowed = self.errors(ours, wanted), self.errors(plain, wanted)
        assert errors["y"] <= 2 * allowed["y"]
        for name, error in errors.items():
            assert error <= 3 * allowed[name], f"{name}: {error:.2e}, plain torch {allowed[name]:.2e}"

    @variants("CLTG", "mean", "expcache", "grouped", "window")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_read_does_not_see_autocast(self, variant: Variant, dtype: torch.dtype):
        """Projections may be half precision; exponentials, sums, normalizers and caches are float32."""
        m = variant.build(dtype=torch.float32)
        x = tokens(dtype=torch.float32)
        with torch.no_grad():
            (inputs, v, *_), layout = m.prepare(x)
            wanted = m.prior.read(inputs, v, m._beta(), layout, None, False)[:2]
            with torch.autocast("cpu", dtype):
                full = m.prior.read(inputs, v, m._beta(), layout, None, False)[:2]
                state, steps = None, []
                for t in range(LENGTH):
                    here = slice(t, t + 1)
                    step_layout = layout._replace(position=layout.position[:, here])
                    step = {name: value[:, here] for name, value in inputs.items()}
                    mean, free, state = m.prior.read(step, v[:, here], m._beta(), step_layout, state, True)
                    steps.append((mean, free))
        for i, name in enumerate(("mean", "free energy")):
            if wanted[i] is not None:
                assert_close({name: full[i]}, {name: wanted[i]}, ROUNDING)
                assert_close({name: torch.cat([step[i] for step in steps], 1)}, {name: wanted[i]}, ROUNDING)

    @variants("CLTG")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_half_precision_module_runs(self, variant: Variant, dtype: torch.dtype):
        exact = variant.build()
        m = copy.deepcopy(exact).to(dtype)
        x = tokens()
        y = m(x.to(dtype))
        assert y.dtype == dtype
        assert_close({"y": y}, {"y": exact(x)}, 0.1 if dtype == torch.bfloat16 else 0.02)
