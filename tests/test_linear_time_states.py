"""Linear-time priors: states, encoders, memory spans, options, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from linear_time import CASES, DIM, EVERY_CASE, HEADS, LINEAR_TIME, Case, gates_as_given
from matrix import assert_close, noise, stir, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from femixer import FreeEnergyMixer
from femixer.kernels import rotary_angles
from femixer.layout import Layout, Past
from femixer.priors import PRIORS, Prior
from femixer.state import State


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
    def test_a_step_after_a_million_tokens_is_a_step(self, case: Case, monkeypatch: pytest.MonkeyPatch):
        # Angles of positions that an earlier test asked for are kept, and cost it no operations: here none are.
        monkeypatch.setattr(rotary_angles, "_kept", rotary_angles._kept.__wrapped__)
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
