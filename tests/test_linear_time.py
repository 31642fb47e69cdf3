"""Scans of linear-time priors: long sequences, log space, gradients, extreme tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
from linear_time import CASES, DIM, EVERY_CASE, HEADS, WIDTH, Case, gates_as_given, values
from matrix import assert_gradient, noise, oracle, outcome, stir, tokens
from torch import Tensor

from femixer.layout import Layout
from femixer.priors import PRIORS, Prior
from femixer.priors.aft import ChannelPrior

# Keys that are exponents are drawn from plus and minus this.
EXPONENTS = {"aft": 80.0}


STRONG = 50.0  # logit of a gate of -50, or with a minus of one of about 0


LOG_SPACE = [case for case in CASES if issubclass(PRIORS[case.prior], ChannelPrior)]


EVERY_GATE = pytest.mark.parametrize(
    ("case", "gates"), [pytest.param(case, gates, id=f"{case}-{gates}") for case in CASES for gates in case.gates()]
)


def choice(*shape: int, share: float, seed: int) -> Tensor:
    """+1 with probability `share`, else -1."""
    random = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(random < share, 1.0, -1.0)


def projections(case: Case, prior: Prior, length: int, gates: str) -> dict[str, Tensor]:
    """Inputs of a prior as a mixer would project them; logits of gates and exponents are extreme."""
    inputs = {}
    for seed, (name, columns) in enumerate(prior.columns().items()):
        shape = 1, length, columns.width
        if columns.additive:
            if gates == "mixed":  # a gate of -50 every hundred tokens, in other places for every channel
                inputs[name] = STRONG * choice(*shape, share=0.01, seed=20 + seed)
            elif gates == "moderate":
                inputs[name] = STRONG * choice(*shape, share=0.05, seed=20 + seed)
                inputs[name][:, ::3] = 2 * noise(*shape, seed=30 + seed, dtype=torch.float32)[:, ::3] - 2
            else:
                inputs[name] = torch.full(shape, -STRONG if gates == "open" else STRONG)
        elif case.prior in EXPONENTS:
            inputs[name] = EXPONENTS[case.prior] * choice(*shape, share=0.5, seed=20 + seed)
        else:
            inputs[name] = noise(*shape, seed=20 + seed, dtype=torch.float32)
    return inputs


def temperatures(groups: int) -> Tensor:
    """beta [groups, WIDTH] from 0.02 to 10, in no order."""
    order = torch.randperm(groups * WIDTH, generator=torch.Generator().manual_seed(13))
    return torch.logspace(-1.69, 1, groups * WIDTH)[order].view(groups, WIDTH)


def setup_read(
    case: Case, kind: str, gates: str, length: int, causal: bool = True
) -> tuple[Prior, dict[str, Tensor], Tensor, Tensor, Layout]:
    prior = case.build(causal=causal, parts="L", value_dim=HEADS * WIDTH).prior
    gates_as_given(prior, gates)
    beta = temperatures(HEADS)
    if prior.one_temperature:
        beta = beta[:, :1]
    layout = Layout(None, torch.arange(length)[None])
    v = values(kind, length, beta.expand(-1, WIDTH))
    return prior, projections(case, prior, length, gates), v, beta, layout


def size_of(prior: Prior, v: Tensor) -> Tensor:
    """Largest |v| of what a channel reads, [B, 1, H, D or 1]."""
    return v.abs().amax((1, 3) if prior.one_temperature else 1, keepdim=True)


def largest_visible(prior: Prior, v: Tensor, rows: Tensor) -> Tensor:
    """[B, rows, H, D]"""
    if prior.one_temperature:  # a head's channels read each other's values
        v = v.amax(-1, keepdim=True).expand_as(v)
    if not prior.causal:
        return v.amax(1, keepdim=True).expand(-1, len(rows), -1, -1)
    return v.cummax(1).values[:, rows]


class TestLongSequences:
    LENGTH = 16384
    ROWS = torch.tensor([0, 1, 5000, LENGTH - 1])

    @EVERY_GATE
    @pytest.mark.parametrize("kind", ["tame", "wild"])
    def test_reads_of_16384_tokens_are_exact(self, case: Case, gates: str, kind: str):
        prior, inputs, v, beta, layout = setup_read(case, kind, gates, self.LENGTH)
        with torch.no_grad():
            mean, free, _ = prior.read(inputs, v, beta, layout, None, False)
            wanted_mean, wanted = oracle(prior, inputs, v, beta, layout, self.ROWS)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        every = torch.arange(self.LENGTH)
        rounding = 1e-6 * size_of(prior, v.double()).clamp(min=1)
        assert (mean <= free + rounding).all()
        assert (free <= largest_visible(prior, v.double(), every) + rounding).all()
        mean, free, top = mean[:, self.ROWS], free[:, self.ROWS], largest_visible(prior, v.double(), self.ROWS)
        assert ((mean - wanted_mean).abs() <= 1e-5 * size_of(prior, v)).all()
        within_sight = (beta >= 0.02) & (beta.double() * (top - wanted) <= 60)
        assert within_sight.double().mean() > 0.4
        error = (free - wanted).abs() / wanted.abs().clamp(min=1)
        assert error[within_sight].max() <= 1e-5

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_an_encoder_reads_16384_tokens_exactly(self, case: Case):
        gates = case.gates()[-1]
        prior, inputs, v, beta, layout = setup_read(case, "wild", gates, self.LENGTH, causal=False)
        with torch.no_grad():
            mean, free, _ = prior.read(inputs, v, beta, layout, None, False)
            wanted_mean, wanted = oracle(prior, inputs, v, beta, layout, self.ROWS)
        assert mean.isfinite().all()
        assert free.isfinite().all()
        mean, free = mean[:, self.ROWS], free[:, self.ROWS]
        top = largest_visible(prior, v.double(), self.ROWS)
        assert ((mean - wanted_mean).abs() <= 1e-5 * size_of(prior, v)).all()
        within_sight = beta.double() * (top - wanted) <= 60
        assert within_sight.any()
        error = (free - wanted).abs() / wanted.abs().clamp(min=1)
        assert error[within_sight].max() <= 1e-5


class TestHeadsWithoutOutliers:
    """Nothing in these heads asks for the exact read."""

    LENGTH = 4096

    @pytest.mark.parametrize("case", [case for case in CASES if case.prior in ("linear", "gla")], ids=str)
    @pytest.mark.parametrize("beta", [0.05, 0.1])
    def test_sums_over_many_chunks_keep_their_digits(self, case: Case, beta: float):
        prior, inputs, v, _, layout = setup_read(case, "tame", case.gates()[0], self.LENGTH)
        ramp = torch.linspace(-2, 2, self.LENGTH)[:, None]
        v = torch.stack([2 * noise(self.LENGTH, HEADS, seed=5).float(), ramp.expand(-1, HEADS)], -1)[None]
        temperature = torch.full((HEADS, 2), beta)
        rows = torch.linspace(0, self.LENGTH - 1, 60).long()
        with torch.no_grad():
            _, free, _ = prior.read(inputs, v, temperature, layout, None, False)
            _, wanted = oracle(prior, inputs, v, temperature, layout, rows)
        assert ((free[:, rows] - wanted).abs() / wanted.abs().clamp(min=1)).max() <= 1e-5

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("weight", [-5.0, 0.5, 5.0])
    def test_a_weight_of_the_token_itself_keeps_the_free_energy_exact(self, weight: float, causal: bool):
        case = Case("mamba", {"state_size": 3, "skip": True})
        prior, inputs, v, _, layout = setup_read(case, "tame", "closing", 300, causal)
        with torch.no_grad():
            prior.skip.fill_(weight)
        v = noise(1, 300, HEADS, WIDTH, seed=5).float()
        beta = torch.full((HEADS, WIDTH), 0.02)
        with torch.no_grad():
            mean, free, _ = prior.read(inputs, v, beta, layout, None, False)
            _, wanted = oracle(prior, inputs, v, beta, layout)
        assert ((free - wanted).abs() / wanted.abs().clamp(min=1)).max() <= 2e-6
        every = torch.arange(300)
        assert (free <= largest_visible(prior, v, every) + 1e-6).all()
        assert (mean <= free + 1e-6).all()


class TestGatesThatAlternate:
    """Each row of a state fades at other tokens than its neighbour, so that no step lets all of them fade: what an
    outlier has left must not hide what came after it."""

    LENGTH = 61

    @EVERY_CASE
    @pytest.mark.parametrize("period", [1, 3])
    @pytest.mark.parametrize("strength", [0.5, 4.0, STRONG])
    def test_an_outlier_that_fades_leaves_the_free_energy_exact(self, case: Case, period: int, strength: float):
        prior, inputs, v, beta, layout = setup_read(case, "tame", case.gates()[-1], self.LENGTH)
        for name, columns in prior.columns().items():
            if columns.additive:
                turn = torch.arange(self.LENGTH)[:, None] // period + torch.arange(columns.width)
                inputs[name] = (strength * (2.0 * (turn % 2) - 1))[None]
        v[:, 5] = 600 / beta.expand(-1, WIDTH)
        with torch.no_grad():
            _, free, _ = prior.read(inputs, v, beta, layout, None, False)
            _, wanted = oracle(prior, inputs, v, beta, layout)
        error = (free - wanted).abs() / wanted.abs().clamp(min=1)
        assert error.max() <= 2e-5  # float32 exponents of 600 at temperatures down to 0.02


class TestLogSpace:
    LENGTH = 701

    @pytest.mark.parametrize(
        ("case", "gates"),
        [pytest.param(case, gates, id=f"{case}-{gates}") for case in LOG_SPACE for gates in case.gates()],
    )
    @pytest.mark.parametrize("causal", [True, False])
    def test_values_thousands_of_nats_beyond_sight_are_still_exact(self, case: Case, gates: str, causal: bool):
        """Weights of exp(-50 n) are no numbers, but their logarithms are."""
        prior, inputs, v, beta, layout = setup_read(case, "wild", gates, self.LENGTH, causal)
        with torch.no_grad():
            mean, free, _ = prior.read(inputs, v, beta, layout, None, False)
            rows = torch.tensor([0, 1, 2, 99, 350, 699, 700])
            scores = prior.log_scores(prior.tracks(inputs, layout, torch.float64), rows)  # [B, H, rows, T, D]
        scores = scores.masked_fill(~prior.visible(layout, rows)[:, None, ..., None], -torch.inf)
        x, b = v.double().transpose(1, 2)[:, :, None], beta.double()
        wanted = ((scores + b[:, None, None] * x).logsumexp(3) - scores.logsumexp(3)).transpose(1, 2) / b
        wanted_mean = (scores.softmax(3) * x).sum(3).transpose(1, 2)
        beyond = b * (largest_visible(prior, v.double(), rows) - wanted) > 60
        assert beyond.any() == (gates != "open")
        error = (free[:, rows] - wanted).abs() / wanted.abs().clamp(min=1)
        assert error.max() <= 1e-5
        assert ((mean[:, rows] - wanted_mean).abs() <= 1e-5 * size_of(prior, v)).all()


class TestGradients:
    LENGTH = 150  # several chunks, and more than any block
    # Its dense weights are over pairs of token and channel.
    LENGTHS: ClassVar[dict[str, int]] = {"mamba-interactive": 70}

    def gradients(
        self, case: Case, kind: str, gates: str, causal: bool
    ) -> Iterator[tuple[int, str, Tensor, Tensor, Tensor, Tensor]]:
        """Channel, name, gradient of mean and free energy within sight, the oracle's; largest |v| and beta [G]."""
        prior, inputs, v, beta, layout = setup_read(
            case, kind, gates, self.LENGTHS.get(case.prior, self.LENGTH), causal
        )
        leaves = {**inputs, "v": v, "beta": beta}
        wide = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        wanted_mean, wanted = oracle(prior, {name: wide[name] for name in inputs}, wide["v"], wide["beta"], layout)
        mean, free, _ = prior.read(inputs, v, beta, layout, None, False)
        top = largest_visible(prior, wide["v"].detach(), torch.arange(v.shape[1]))
        within_sight = (wide["beta"] * (top - wanted) <= 60).double()
        for channel in range(WIDTH):
            cotangent = noise(*free.shape, seed=channel) * within_sight
            cotangent[..., :channel] = cotangent[..., channel + 1 :] = 0
            actual = torch.autograd.grad(
                ((mean + free) * cotangent.float()).sum(), list(leaves.values()), retain_graph=True
            )
            expected = torch.autograd.grad(
                ((wanted_mean + wanted) * cotangent).sum(), list(wide.values()), retain_graph=True
            )
            size = size_of(prior, v.detach()).expand(1, 1, HEADS, WIDTH)[0, 0, :, channel]
            temperature = beta.detach().expand(HEADS, WIDTH)[:, channel]
            for name, a, e in zip(leaves, actual, expected, strict=True):
                yield channel, name, a, e, size, temperature

    @pytest.mark.parametrize(
        ("case", "gates"),
        [
            pytest.param(case, gates, id=f"{case}-{gates}")
            for case in CASES
            for gates in (["mixed", "moderate"] if "mixed" in case.gates() else ["own"])
        ],
    )
    @pytest.mark.parametrize(("kind", "causal"), [("tame", True), ("wild", True), ("wild", False)])
    def test_gradients_with_extreme_gates_are_those_of_the_definition(
        self, case: Case, kind: str, gates: str, causal: bool
    ):
        for channel, name, actual, expected, size, beta in self.gradients(case, kind, gates, causal):
            assert_gradient(f"{name}, channel {channel}", actual, expected, size, beta, self.LENGTH)


class TestExtremeTokens:
    TOKENS: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "times 1e4": lambda x: 1e4 * x,
        "times 1e6": lambda x: 1e6 * x,
        "times 1e-8": lambda x: 1e-8 * x,
        "zero": torch.zeros_like,
        "constant": lambda x: torch.full_like(x, 3.0),
        "one giant": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 40, 1e6 * x, x),
    }

    @EVERY_CASE
    @pytest.mark.parametrize("change", TOKENS.values(), ids=TOKENS)
    @pytest.mark.parametrize("causal", [True, False])
    def test_output_and_gradients_are_finite(self, case: Case, change: Callable[[Tensor], Tensor], causal: bool):
        m = stir(case.build(causal=causal))
        x = change(tokens(length=70, dim=DIM, dtype=torch.float32))
        mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.8
        for layout in ({}, {"mask": mask}):
            for name, value in outcome(m, lambda x, layout=layout: m(x, **layout), x).items():
                assert value.isfinite().all(), name

    @EVERY_CASE
    @pytest.mark.parametrize("change", TOKENS.values(), ids=TOKENS)
    def test_a_stream_of_them_is_finite_and_the_same(self, case: Case, change: Callable[[Tensor], Tensor]):
        m = stir(case.build())
        x = change(tokens(length=70, dim=DIM, dtype=torch.float32))
        with torch.no_grad():
            whole, state, parts = m(x), None, []
            for part in x.split([1, 1, 37, 1, 30], 1):
                y, state = m(part, state=state, return_state=True)
                parts.append(y)
        streamed = torch.cat(parts, 1)
        assert streamed.isfinite().all()
        assert ((streamed - whole).abs() <= 1e-4 * whole.abs().amax().clamp(min=1e-3)).all()
