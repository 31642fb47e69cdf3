"""What priors that scan along time promise beyond the matrix: any length, any gates, a state of constant size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, oracle, outcome, stir, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from femixer import FreeEnergyMixer
from femixer.layout import Layout, Past
from femixer.priors import PRIORS, Prior
from femixer.priors.aft import ChannelPrior
from femixer.priors.directed import DirectedPrior
from femixer.state import State

LINEAR_TIME = [name for name, kind in PRIORS.items() if issubclass(kind, DirectedPrior)]

# Options of a prior that change how it scans; few modes keep the dense weights of long sequences small.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gla": [{"decay": "head"}, {"decay": "channel"}],
    "ssm": [{"state_size": 3}],
    "mamba": [{"state_size": 3}],
    "mamba-interactive": [{"state_size": 3}],
}
# Keys that are exponents are drawn from plus and minus this.
EXPONENTS = {"aft": 80.0}

STRONG = 50.0  # logit of a gate of -50, or with a minus of one of about 0
DIM, HEADS, WIDTH = 16, 2, 4


class Case(NamedTuple):
    prior: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.prior, *map(str, self.options.values())])

    def build(self, **more: Any) -> FreeEnergyMixer:
        given = {"dim": DIM, "heads": HEADS, "prior_options": self.options, **more}
        torch.manual_seed(0)
        return FreeEnergyMixer(prior=self.prior, **given)

    def without_rope(self, **more: Any) -> FreeEnergyMixer:
        return self.build(rope=False if PRIORS[self.prior].queries_and_keys else None, **more)

    def gates(self) -> list[str]:
        """Kinds of gates worth a test: priors without input-dependent gates have one."""
        gated = any(columns.additive for columns in self.build().prior.columns().values())
        return ["open", "closing", "mixed"] if gated else ["own"]


CASES = [Case(name, options) for name in LINEAR_TIME for options in OPTIONS.get(name, [{}])]
LOG_SPACE = [case for case in CASES if issubclass(PRIORS[case.prior], ChannelPrior)]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
EVERY_GATE = pytest.mark.parametrize(
    ("case", "gates"), [pytest.param(case, gates, id=f"{case}-{gates}") for case in CASES for gates in case.gates()]
)


def choice(*shape: int, share: float, seed: int) -> Tensor:
    """+1 with probability `share`, else -1."""
    random = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(random < share, 1.0, -1.0)


def gates_as_given(prior: Prior, gates: str) -> None:
    """Take a prior's own part out of its gates; of mixed gates per key channel some rows fade fast, others never."""
    with torch.no_grad():
        for name, parameter in prior.named_parameters():
            if name in ("decay_bias", "delta_bias"):
                parameter.zero_()
            elif name in ("decay_map", "delta_map"):
                pattern = torch.tensor([1.0, -1.0, 1.0, 0.0])[torch.arange(parameter.shape[0]) % 4]
                parameter.copy_((pattern if gates == "mixed" else pattern.new_ones(pattern.shape))[:, None])


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


def values(kind: str, length: int, beta: Tensor) -> Tensor:
    """[1, length, G, 4], the last axis one pattern each; wild ones have |beta v| up to 1e4."""
    groups = beta.shape[0]
    random = noise(length, groups, seed=11)
    ramp = torch.linspace(-1, 1, length, dtype=torch.float64)[:, None].expand(-1, groups)
    if kind == "tame":
        patterns = [random, 1e-3 * random, 5 * ramp, random + 100]
    else:
        size = 1e4 / beta.double()
        giant = (torch.arange(length) == length // 4)[:, None]
        patterns = [
            size[:, 0] * random / random.abs().max(),
            size[:, 1] * ramp,
            -size[:, 2] * ramp,
            torch.where(giant, size[:, 3], random),
        ]
    return torch.stack(patterns, -1)[None].float()


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
        """Relative to the gradient, and to the terms of order v / beta whose difference it is."""
        eps = torch.finfo(torch.float32).eps
        for channel, name, actual, expected, size, beta in self.gradients(case, kind, gates, causal):
            error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
            tolerance = max(1e-4, 8 * eps * (beta * size).max().item())
            terms = {"v": 1.0, "beta": self.LENGTH * (size / beta).max().item()}.get(name, size.max().item())
            allowed = tolerance * scale + 8 * eps * max(1.0, terms)
            assert error <= allowed, f"d {name}, channel {channel}: {error:.1e} of {scale:.1e}, allowed {allowed:.1e}"


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


def tensors_of(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if dataclasses.is_dataclass(state):
        state = tuple(getattr(state, field.name) for field in dataclasses.fields(state))
    return [x for part in state for x in tensors_of(part)] if isinstance(state, tuple | list) else []


class Operations(TorchDispatchMode):
    """Every operator that runs, with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        shapes = [tuple(x.shape) for x in (*args, result) if isinstance(x, Tensor)]
        self.log.append((str(function), shapes))
        return result


class TestState:
    @EVERY_CASE
    @pytest.mark.parametrize("parts", ["CLTG", ""])
    def test_size_does_not_grow(self, case: Case, parts: str):
        m = case.build(parts=parts)
        x = tokens(length=1000, dim=DIM, dtype=torch.float32)
        with torch.no_grad():
            _, early = m(x[:, :10], return_state=True)
            _, late = m(x, return_state=True)
        sizes = [[(x.shape, x.dtype, x.nbytes) for x in tensors_of(s)] for s in (early, late)]
        assert sizes[0]
        assert sizes[0] == sizes[1]

    @EVERY_CASE
    def test_it_keeps_nothing_of_the_sequence_in_memory(self, case: Case):
        """A view of the last row would hold all rows."""
        m = case.build()
        with torch.no_grad():
            _, state = m(tokens(length=1000, dim=DIM, dtype=torch.float32), return_state=True)
        for x in tensors_of(state):
            assert x.untyped_storage().nbytes() == x.nbytes, tuple(x.shape)

    @EVERY_CASE
    @pytest.mark.parametrize("marks", ["none", "mask", "segments"])
    def test_long_sequences_are_mixed_in_stretches_without_gradients(
        self, case: Case, marks: str, monkeypatch: pytest.MonkeyPatch
    ):
        m, x = stir(case.build(dtype=torch.float64)), tokens(3, 23, DIM).requires_grad_()
        given: dict[str, Any] = {}
        if marks == "mask":
            given["mask"] = noise(3, 23, seed=5) > -0.5
        elif marks == "segments":
            given["segments"] = (torch.arange(23) // 7).expand(3, -1) - (noise(3, 23, seed=5) < -1).long() * 100
        with torch.no_grad():
            past = m(noise(3, 4, DIM, seed=9), return_state=True)[1]
            whole, after = m(x, **given, state=past, return_state=True)
            monkeypatch.setattr("femixer.layer.STRETCH", 5 * 3 * DIM)
            lengths: list[int] = []
            sees: list[bool] = []
            m.out_proj.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
            m.conditioner.register_forward_pre_hook(lambda _, inputs: sees.append(inputs[0].requires_grad))
            parts, end = m(x, **given, state=past, return_state=True)
            assert lengths == ([5, 5, 5, 5, 3] if m.prior.reads_on else [23])
            assert not m.prior.reads_on or not any(sees)  # a slice of x without gradients would still say it had some
            later = [m(x[:, :1], state=state) for state in (end, after)]
        assert_close({"y": parts, "next": later[0]}, {"y": whole, "next": later[1]}, 1e-10)

    @EVERY_CASE
    def test_a_step_after_a_million_tokens_is_a_step(self, case: Case):
        m = stir(case.build())
        x = tokens(length=11, dim=DIM, dtype=torch.float32)
        with torch.no_grad():
            _, state = m(x[:, :10], return_state=True)
            runs: list[tuple[Tensor, State, Operations]] = []
            for here in (state, dataclasses.replace(state, past=Past(seen=1_000_000))):
                with Operations() as operations:
                    y, after = m(x[:, 10:], state=here, return_state=True)
                runs.append((y, after, operations))
        (near, after_near, early), (far, after_far, late) = runs
        assert after_far.past.seen == 1_000_001
        assert far.isfinite().all()
        assert early.log == late.log
        assert [x.shape for x in tensors_of(after_near)] == [x.shape for x in tensors_of(after_far)]
        # Rotary features are not relative; nothing else knows the position.
        assert torch.equal(near, far) != PRIORS[case.prior].queries_and_keys


class TestEncoder:
    LENGTH = 11
    # log p_t(i) - log p_t(t) at distance n for constant inputs with the decay logit c, where the formula is this short.
    BY_DISTANCE: ClassVar[dict[str, Callable[[float, Tensor], Tensor]]] = {
        "aft": lambda c, n: torch.zeros_like(n),
        "linear": lambda c, n: torch.zeros_like(n),
        "decay": lambda c, n: -F.softplus(torch.tensor(c, dtype=n.dtype)) * n,
        "gla": lambda c, n: -F.softplus(torch.tensor(c, dtype=n.dtype)) * n,
    }

    def random_inputs(self, prior: Prior) -> dict[str, Tensor]:
        return {
            name: noise(2, self.LENGTH, columns.width, seed=seed)
            for seed, (name, columns) in enumerate(prior.columns().items())
        }

    def layout(self) -> Layout:
        return Layout(None, torch.arange(self.LENGTH)[None])

    @EVERY_CASE
    def test_weights_of_the_reversed_sequence_are_mirrored(self, case: Case):
        prior = stir(case.without_rope(causal=False, dtype=torch.float64)).prior
        inputs, layout = self.random_inputs(prior), self.layout()
        p = prior.over_tokens(prior.weights(inputs, layout))
        mirrored = prior.over_tokens(prior.weights({name: x.flip(1) for name, x in inputs.items()}, layout))
        assert_close({"p": mirrored.flip(2, 3)}, {"p": p}, 1e-12)

    @EVERY_CASE
    def test_the_read_weighs_every_token_once(self, case: Case):
        """The mean of a value that is 1 at one token and 0 elsewhere is that token's weight."""
        m = stir(case.without_rope(causal=False, dtype=torch.float64))
        layout = self.layout()
        inputs = {name: x[:1] for name, x in self.random_inputs(m.prior).items()}
        p = m.prior.over_tokens(m.prior.weights(inputs, layout))  # [1, H, t, i] or [1, H, t, i, D]
        one_hot = torch.eye(self.LENGTH, dtype=torch.float64)[..., None, None]
        v = one_hot.expand(-1, -1, m.kv_heads, m.widths.value)
        each = {name: x.expand(self.LENGTH, -1, -1) for name, x in inputs.items()}
        mean, _, _ = m.prior.read(each, v, None, layout, None, False)  # [i, t, H, D]
        wanted = (p if p.dim() == 5 else p[..., None])[0].permute(2, 1, 0, 3).expand_as(mean)
        assert_close({"p": mean}, {"p": wanted}, 1e-12)
        assert_close({"sum": mean.sum(0)}, {"sum": torch.ones_like(mean[0])}, 1e-12)

    @EVERY_CASE
    def test_constant_tokens_are_weighed_by_distance_on_both_sides(self, case: Case):
        prior = case.without_rope(causal=False, dtype=torch.float64).prior
        gates_as_given(prior, "open")
        logit, middle = 0.3, self.LENGTH // 2
        inputs = {
            name: torch.full((1, self.LENGTH, columns.width), logit if columns.additive else 0.7, dtype=torch.float64)
            for name, columns in prior.columns().items()
        }
        p = prior.over_tokens(prior.weights(inputs, self.layout()))
        row = p[:, :, middle]
        assert_close({"p": row.flip(2)}, {"p": row}, 1e-12)
        assert_close({"sum": p.sum(3)}, {"sum": torch.ones_like(p.sum(3))}, 1e-12)
        if case.prior in self.BY_DISTANCE:
            at = torch.arange(self.LENGTH, dtype=torch.float64)
            wanted = self.BY_DISTANCE[case.prior](logit, (at - at[:, None]).abs()).softmax(-1)
            wanted = wanted[..., None] if p.dim() == 5 else wanted
            assert_close({"p": p}, {"p": wanted.expand_as(p)}, 1e-12)


class TestMemorySpans:
    @staticmethod
    def of_gates(prior: Prior) -> Tensor:
        """What a token without content leaves of the past is exp(-1 / span)."""
        inputs = {name: torch.zeros(1, 1, columns.width) for name, columns in prior.columns().items()}
        return -1 / prior.tracks(inputs, Layout(None, torch.zeros(1, 1)), torch.float64)["gate"][0, 0]

    @staticmethod
    def of_slowest_mode(prior: Prior) -> Tensor:
        slowest = F.softplus(prior.rate.double()).amin(-1)
        return 1 / (F.softplus(prior.delta_bias.double()) * slowest)

    # [groups, members]: the members of every group are spread.
    SPANS: ClassVar[dict[str, Callable[[Prior], Tensor]]] = {
        "decay": lambda prior: TestMemorySpans.of_gates(prior),
        "gla-head": lambda prior: TestMemorySpans.of_gates(prior).mT,
        "gla-channel": lambda prior: TestMemorySpans.of_gates(prior),
        "ssm": lambda prior: 1 / F.softplus(prior.rate.double()).flatten(0, 1),
        "mamba": lambda prior: TestMemorySpans.of_slowest_mode(prior),
        "mamba-interactive": lambda prior: TestMemorySpans.of_slowest_mode(prior)[None],
    }

    @pytest.mark.parametrize("name", SPANS)
    def test_a_prior_starts_with_memories_of_2_to_1000_tokens(self, name: str):
        case = next(case for case in CASES if str(case).startswith(name))
        with torch.no_grad():
            spans = self.SPANS[name](case.build(dim=64, heads=8).prior)
        for every in spans.sort().values:
            assert len(every) >= 3
            assert every[0].item() == pytest.approx(2, rel=0.01)
            assert every[-1].item() == pytest.approx(1000, rel=0.01)
            ratio = every[1:] / every[:-1]  # evenly in the logarithm
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-2, atol=0)

    def test_every_prior_that_forgets_is_among_them(self):
        assert {name.split("-head")[0].split("-channel")[0] for name in self.SPANS} == {*LINEAR_TIME} - {
            "aft",
            "linear",
        }


class TestOptions:
    @pytest.mark.parametrize(
        ("prior", "given", "words"),
        [
            ("aft", {"prior_options": {"decay": "head"}}, ["decay='head'", "prior='aft'"]),
            ("decay", {"prior_options": {"decay": "head"}}, ["decay='head'", "prior='decay'"]),
            ("linear", {"prior_options": {"decay": "head"}}, ["decay='head'", "prior='linear'", "rope_base"]),
            ("linear", {"window": 5}, ["window=5", "prior='linear'", "rope_base"]),
            ("gla", {"window": 5}, ["window=5", "prior='gla'", "decay", "rope_base"]),
            ("aft", {"window": 5}, ["window=5", "prior='aft'"]),
            ("aft", {"rope": True}, ["rope=True", "prior='aft'", "queries and keys"]),
            ("decay", {"rope": True}, ["rope=True", "prior='decay'", "queries and keys"]),
            ("aft", {"kv_heads": 1}, ["kv_heads=1", "prior='aft'", "queries and keys"]),
            ("decay", {"kv_heads": 1}, ["kv_heads=1", "prior='decay'", "queries and keys"]),
            ("gla", {"prior_options": {"decay": "both"}}, ["decay='both'", "head", "channel"]),
            ("gla", {"prior_options": {"rope_base": -1.0}}, ["rope_base=-1.0", "positive"]),
            ("ssm", {"prior_options": {"normalize": False}}, ["normalize=False", "prior='ssm'", "state_size"]),
            ("mamba", {"prior_options": {"state_size": 0}}, ["state_size=0", "positive"]),
            ("mamba", {"kv_heads": 1}, ["kv_heads=1", "prior='mamba'", "queries and keys"]),
        ],
    )
    def test_an_option_that_does_not_fit_is_refused_by_name(self, prior: str, given: dict, words: list[str]):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are compared below
            FreeEnergyMixer(DIM, HEADS, prior, **given)
        for word in words:
            assert word in str(raised.value), str(raised.value)


class TestTraining:
    @EVERY_CASE
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_few_steps_lower_the_loss_and_move_every_parameter(self, case: Case, causal: bool):
        m = case.build(causal=causal)
        x, target = (tokens(batch=2, length=19, dim=DIM, dtype=torch.float32, seed=seed) for seed in (1, 2))
        before = {name: parameter.detach().clone() for name, parameter in m.named_parameters()}
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.0)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (m(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        for name, parameter in m.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.count_nonzero() > 0, name
            assert (parameter != before[name]).any(), name
