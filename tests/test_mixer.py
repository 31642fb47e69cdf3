"""FreeEnergyMixer: what each part means, initial values, gates, shapes and strides."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from matrix import DIM, HEADS, assert_close, noise, outcome, stir, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from femixer import FreeEnergyMixer, free_energy
from femixer.gates import gated_read, outer_gate, temperature_gate
from femixer.layout import Past, arrange
from femixer.priors import PRIORS
from femixer.projection import Columns, Projection

PARTS = ["".join(p) for n in range(5) for p in itertools.combinations("CLTG", n) if "T" not in p or "L" in p]
priors = pytest.mark.parametrize("prior", PRIORS)
every_parts = pytest.mark.parametrize("parts", PARTS)


def project(projection: Projection, x: Tensor, features: Tensor | None) -> dict[str, Tensor]:
    """x W + b, times 1 + eta, or plus eta where the columns are logits of a decay or step."""
    columns, start = {}, 0
    for name, (width, additive, _) in projection.columns.items():
        rows = slice(start, start + width)
        columns[name] = x @ projection.linear.weight[rows].T + projection.linear.bias[rows]
        if features is not None:
            eta = features @ projection.modulation[rows].T
            columns[name] = columns[name] + eta if additive else columns[name] * (1 + eta)
        start += width
    return columns


def formula(m: FreeEnergyMixer, x: Tensor) -> Tensor:
    """Equation (fem-unified), part by part, on the dense prior."""
    layout, _ = arrange(x, None, None, Past())
    features = m.conditioner(x, layout)[0] if "C" in m.parts else None
    inputs = {} if m.prior_proj is None else project(m.prior_proj, x, features)
    values = project(m.value_proj, x, features)
    by_head = {name: value.unflatten(-1, (-1, m.widths.value)).transpose(1, 2) for name, value in values.items()}
    v = m.prior.over_index(by_head["v"].transpose(1, 2)).transpose(1, 2).repeat_interleave(m.heads // m.kv_heads, 1)
    p = m.prior.weights(inputs, layout)
    read = (p * v[:, :, None] if p.dim() == 5 else p[..., None] * v[:, :, None]).sum(3)
    if "L" in m.parts:
        mean, beta = read, F.softplus(m.raw_beta + 1.8).repeat_interleave(m.heads // m.kv_heads, 0)[:, None]
        read = free_energy(p, v, beta)
        if "T" in m.parts:
            lam = 1 / (1 + (-by_head["lam"]).exp())
            read = mean + lam * (read - mean)
    if "G" in m.parts:
        gate = (1 + by_head["gate"].exp()).log()
        read = read * gate / (gate.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return read.transpose(1, 2).flatten(2) @ m.out_proj.weight.T + m.out_proj.bias


class TestParts:
    @priors
    @every_parts
    @pytest.mark.parametrize("causal", [True, False])
    def test_every_subset_of_parts_is_its_formula(self, prior: str, parts: str, causal: bool):
        m, x = stir(FreeEnergyMixer(DIM, HEADS, prior, parts=parts, causal=causal, dtype=torch.float64)), tokens()
        assert_close(outcome(m, m, x), outcome(m, lambda x: formula(m, x), x), 1e-9)

    def test_there_are_twelve_subsets(self):
        assert len(PARTS) == 12

    @priors
    @every_parts
    def test_the_order_of_letters_is_irrelevant(self, prior: str, parts: str):
        m, other = (FreeEnergyMixer(DIM, HEADS, prior, parts=p) for p in (parts, parts[::-1]))
        assert m.parts == other.parts == parts
        other.load_state_dict(m.state_dict())
        assert torch.equal(other(tokens(dtype=torch.float32)), m(tokens(dtype=torch.float32)))

    @priors
    @pytest.mark.parametrize("parts", ["C", "CL", "CG", "CLTG"])
    def test_a_new_conditioner_changes_nothing(self, prior: str, parts: str):
        x = tokens(dtype=torch.float32)
        m, without = (FreeEnergyMixer(DIM, HEADS, prior, parts=p) for p in (parts, parts.replace("C", "")))
        unknown = without.load_state_dict(m.state_dict(), strict=False).unexpected_keys
        projections = {"value_proj"} if m.prior_proj is None else {"value_proj", "prior_proj"}
        assert {name.split(".")[0] for name in unknown} == {"conditioner", *projections}
        assert torch.equal(m(x), without(x))

    @priors
    def test_lambda_zero_is_the_mean_and_one_the_free_energy(self, prior: str):
        x = tokens()
        m = stir(FreeEnergyMixer(DIM, HEADS, prior, parts="LT", dtype=torch.float64))
        lam = slice(HEADS * m.widths.value, None)
        for logit, read in ((-1e4, "mean"), (1e4, "free")):
            with torch.no_grad():
                m.value_proj.linear.weight[lam] = 0
                m.value_proj.linear.bias[lam] = logit
            (inputs, v, *_), layout = m.prepare(x)
            mean, free, _ = m.prior.read(inputs, v, m._beta(), layout, None, False)
            assert_close({"y": m(x)}, {"y": m.out_proj((free if read == "free" else mean).flatten(2))}, 1e-12)

    @priors
    def test_the_read_lies_between_mean_and_free_energy(self, prior: str):
        m, x = stir(FreeEnergyMixer(DIM, HEADS, prior, parts="LT", dtype=torch.float64)), tokens()
        (inputs, v, lam, _, _), layout = m.prepare(x)
        mean, free, _ = m.prior.read(inputs, v, m._beta(), layout, None, False)
        read = gated_read(mean, free, lam, None)
        assert (mean <= read + 1e-12).all()
        assert (read <= free + 1e-12).all()


class TestTemperature:
    @pytest.mark.parametrize("kv_heads", [None, 1])
    def test_beta_max_starts_at_softplus_of_1_8(self, kv_heads: int | None):
        m = FreeEnergyMixer(DIM, HEADS, kv_heads=kv_heads)
        assert m.beta_max.shape == (HEADS, m.widths.value)
        assert m.raw_beta.shape == (kv_heads or HEADS, m.widths.value)
        assert torch.allclose(m.beta_max, torch.tensor(math.log1p(math.exp(1.8))))

    def test_beta_max_is_positive_and_shared_by_the_heads_of_a_group(self):
        m = stir(FreeEnergyMixer(DIM, 6, kv_heads=2))
        with torch.no_grad():
            m.raw_beta[0] = -60
        assert (m.beta_max > 0).all()
        assert torch.equal(m.beta_max[0], m.beta_max[2])
        assert torch.equal(m.beta_max[3], m.beta_max[5])
        assert not torch.equal(m.beta_max[2], m.beta_max[3])

    def test_beta_max_is_zero_where_the_mean_is_read(self):
        m = FreeEnergyMixer(DIM, HEADS, parts="CG")
        assert torch.equal(m.beta_max, torch.zeros(HEADS, m.widths.value))


class TestInitialValues:
    @priors
    @pytest.mark.parametrize("parts", ["", "CLTG"])
    def test_projections_are_normal_and_biases_zero(self, prior: str, parts: str):
        torch.manual_seed(0)
        m = FreeEnergyMixer(192, 4, prior, parts=parts)
        projections = [m.value_proj, *([] if m.prior_proj is None else [m.prior_proj])]
        linears = [*(projection.linear for projection in projections), m.out_proj]
        for linear in [*linears, m.conditioner.in_proj] if parts else linears:
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(linear.weight.mean().item()) < 1e-3
        assert m.out_proj.bias.count_nonzero() == 0
        for projection in projections:
            assert projection.linear.bias.count_nonzero() == 0
            assert not parts or projection.modulation.count_nonzero() == 0

    @priors
    def test_one_seed_gives_one_mixer_and_every_module_can_start_again(self, prior: str):
        """reset_parameters on every owner of parameters is what building on the meta device and sharding ask for."""
        torch.manual_seed(3)
        m = FreeEnergyMixer(DIM, HEADS, prior)
        torch.manual_seed(3)
        other = FreeEnergyMixer(DIM, HEADS, prior)
        assert all(torch.equal(a, b) for a, b in zip(m.parameters(), other.parameters(), strict=True))
        for module in m.modules():
            if list(module.parameters(recurse=False)):
                assert callable(getattr(module, "reset_parameters", None)), type(module).__name__

    @priors
    @pytest.mark.parametrize("start", ["paper", "prior"])
    @pytest.mark.parametrize("inside_first", [True, False])
    def test_a_mixer_built_without_data_starts_as_any_other(self, prior: str, start: str, inside_first: bool):
        m = copy.deepcopy(FreeEnergyMixer(192, 4, prior, start=start, device="meta")).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.fill_(torch.nan)
        modules = [module for module in m.modules() if hasattr(module, "reset_parameters")]
        for module in reversed(modules) if inside_first else modules:
            module.reset_parameters()
        for found, wanted in zip(m.parameters(), FreeEnergyMixer(192, 4, prior, start=start).parameters(), strict=True):
            for number in (torch.mean, lambda x: x.std(correction=0)):
                slack = 0.3 * wanted.std(correction=0).item()
                torch.testing.assert_close(number(found), number(wanted), rtol=0.1, atol=slack)

    def test_the_weights_of_a_mixer_go_with_it(self):
        """At once, not when Python looks for cycles: a device may need the room."""
        m = FreeEnergyMixer(DIM, HEADS)
        gone = [weakref.ref(parameter) for parameter in m.parameters()]
        gc.disable()
        try:
            del m
            assert all(parameter() is None for parameter in gone)
        finally:
            gc.enable()

    @priors
    @pytest.mark.parametrize("parts", ["", "CLTG"])
    def test_device_and_dtype_reach_every_parameter(self, prior: str, parts: str):
        for parameter in FreeEnergyMixer(DIM, HEADS, prior, parts=parts, dtype=torch.float64).parameters():
            assert parameter.dtype == torch.float64
        for parameter in FreeEnergyMixer(DIM, HEADS, prior, parts=parts, device="meta").parameters():
            assert parameter.is_meta

    @priors
    def test_without_bias_projections_have_none(self, prior: str):
        m = FreeEnergyMixer(DIM, HEADS, prior, bias=False)
        projections = [p.linear for p in (m.prior_proj, m.value_proj) if p is not None]
        assert all(linear.bias is None for linear in (*projections, m.out_proj))
        x = tokens(dtype=torch.float32)
        assert m(torch.zeros_like(x)).abs().max() < 1e-12
        assert m(x).isfinite().all()


class TestGates:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_gates_stay_in_their_range_for_any_logits(self, dtype: torch.dtype):
        logits = torch.tensor([[-1e4, -80, -1, 0], [0, 1, 80, 1e4], [-80] * 4, [1e4] * 4, [-1e4] * 4], dtype=dtype)
        lam, gate = temperature_gate(logits), outer_gate(logits)
        assert ((lam >= 0) & (lam <= 1)).all()
        assert gate.isfinite().all()
        assert (gate >= 0).all()
        assert (gate[logits >= -80] > 0).all()

    def test_the_outer_gate_has_root_mean_square_one(self):
        gate = outer_gate(3 * noise(5, 7, 3, 11))
        assert gate.square().mean(-1).sqrt().sub(1).abs().max() < 1e-5

    def test_the_outer_gate_is_softplus_up_to_its_size(self):
        logits = noise(5, 7, 3, 11)
        ratio = outer_gate(logits) / (1 + logits.exp()).log()
        assert_close({"ratio": ratio}, {"ratio": ratio[..., :1].expand_as(ratio)}, 1e-12)

    @pytest.mark.parametrize("which", ["mean", "free", "lam", "gate", "lam gate"])
    def test_the_gated_read_and_its_gradient(self, which: str):
        given = {
            "mean": noise(2, 3, 2, 5).requires_grad_(),
            "free": noise(2, 3, 2, 5, seed=1).requires_grad_() if which != "mean" else None,
            "lam_logits": noise(2, 3, 2, 5, seed=2).requires_grad_() if "lam" in which else None,
            "gate_logits": noise(2, 3, 2, 5, seed=3).requires_grad_() if "gate" in which else None,
        }
        mean, free, lam, gate = given.values()
        wanted = mean if free is None else free
        if lam is not None:
            wanted = (1 - lam.sigmoid()) * mean + lam.sigmoid() * free
        if gate is not None:
            wanted = wanted * outer_gate(gate)
        assert_close({"read": gated_read(**given)}, {"read": wanted}, 1e-12)
        names = [name for name, value in given.items() if value is not None]
        leaves = [given[name] for name in names]
        assert torch.autograd.gradcheck(lambda *values: gated_read(**{**given, **dict(zip(names, values))}), leaves)  # noqa: B905

    @priors
    @pytest.mark.parametrize("logit", [-1e4, 1e4])
    def test_extreme_gates_give_finite_outputs_and_gradients(self, prior: str, logit: float):
        m = stir(FreeEnergyMixer(DIM, HEADS, prior))
        with torch.no_grad():
            m.value_proj.linear.bias[HEADS * m.widths.value :] = logit
        for value in outcome(m, m, tokens(dtype=torch.float32)).values():
            assert value.isfinite().all()


class TestProjection:
    """More rows than are modulated at a time (128), and columns that are added to as well as scaled."""

    def module(self) -> Projection:
        columns = {
            "a": Columns(3),
            "decay": Columns(2, additive=True),
            "b": Columns(4),
            "delta": Columns(1, additive=True),
        }
        projection = Projection(5, columns, bias=True, conditioner_channels=3, dtype=torch.float64)
        with torch.no_grad():
            for seed, parameter in enumerate(projection.parameters()):
                parameter.copy_(noise(*parameter.shape, seed=seed))
        return projection

    @pytest.mark.parametrize("length", [0, 1, 97])
    def test_columns_are_scaled_or_added_to(self, length: int):
        projection = self.module()
        leaves = [noise(3, length, 5).requires_grad_(), noise(3, length, 3, seed=1).requires_grad_()]
        wanted = project(projection, *leaves)
        actual = projection(*leaves)
        assert actual.keys() == {"a", "b", "decay", "delta"} == wanted.keys()
        assert {name: value.shape[-1] for name, value in actual.items()} == {"a": 3, "b": 4, "decay": 2, "delta": 1}
        assert_close(actual, wanted, 1e-12)
        leaves += projection.parameters()
        cotangents = {name: noise(*value.shape, seed=seed) for seed, (name, value) in enumerate(wanted.items())}
        losses = [sum((columns[name] * c).sum() for name, c in cotangents.items()) for columns in (actual, wanted)]
        names = [str(i) for i in range(len(leaves))]
        gradients = [dict(zip(names, torch.autograd.grad(loss, leaves), strict=True)) for loss in losses]
        assert_close(*gradients, 1e-12)


class TestInputs:
    @priors
    @pytest.mark.parametrize("parts", ["", "CLTG"])
    def test_strides_of_the_input_are_irrelevant_and_it_is_left_alone(self, prior: str, parts: str):
        m, x = stir(FreeEnergyMixer(DIM, HEADS, prior, parts=parts, dtype=torch.float64)), tokens()
        before = x.clone()

        def restride(x: Tensor) -> Tensor:
            return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)

        assert not restride(x).is_contiguous()
        assert_close(outcome(m, lambda x: m(restride(x)), x), outcome(m, m, x), 1e-12)
        with torch.no_grad():
            assert_close({"y": m(restride(x))}, {"y": m(x)}, 1e-12)
            assert_close({"y": m(x[:, ::2])}, {"y": m(x[:, ::2].contiguous())}, 1e-12)
        assert torch.equal(x, before)
        keep = torch.ones(x.shape[:2], dtype=torch.bool)
        keep[:, 3] = False
        m(x, mask=keep)
        assert torch.equal(x, before)

    @priors
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_parameter_that_is_not_a_number_shows(self, prior: str, causal: bool):
        for length in (8, 70):  # of short and long reads
            for name, _ in FreeEnergyMixer(16, 2, prior).named_parameters():
                m = stir(FreeEnergyMixer(16, 2, prior, causal=causal))
                m.get_parameter(name).data.view(-1)[0] = torch.nan
                with torch.no_grad():
                    assert m(noise(1, length, 16, dtype=torch.float32)).isnan().any(), f"{name}, {length} tokens"

    def test_what_hooks_see_of_a_projection_stays_as_it_was(self):
        m, kept = stir(FreeEnergyMixer(320, 5)), []
        for projection in (m.prior_proj, m.value_proj):
            projection.linear.register_forward_hook(lambda _, __, y: kept.append((y, y.clone())))
        with torch.no_grad():
            m(noise(1, 9, 320, dtype=torch.float32))
        assert len(kept) == 2
        assert all(torch.equal(*pair) for pair in kept)

    @pytest.mark.parametrize("dim", [64, 320])
    def test_a_backward_within_autocast(self, dim: int):
        """A conditioner of few features, and of more than its kernels take."""
        m, x = FreeEnergyMixer(dim, 4), noise(1, 9, dim, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            m(x).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())

    def test_gradients_under_autocast_are_those_without(self):
        """To the precision that torch then has in the gradient of the last projection."""
        m, x = stir(FreeEnergyMixer(64, 2)), noise(2, 71, 64, dtype=torch.float32).requires_grad_()
        wanted = torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()])
        loss = m(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(loss, [x, *m.parameters()])
        for a, b in zip(found, wanted, strict=True):
            assert_close({"x": a}, {"x": b}, 2e-2)

    @pytest.mark.parametrize("size", [1.0, 2000.0])
    def test_a_mixer_may_be_computed_again_for_its_gradients(self, size: float):
        """Checkpointed, also where heads are read again."""
        m, x = stir(FreeEnergyMixer(64, 2)), noise(2, 71, 64, dtype=torch.float32).requires_grad_()
        with torch.no_grad():
            m.value_proj.linear.weight.mul_(size)
        wanted = torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()])
        y = checkpoint(m, x, use_reentrant=False)
        for a, b in zip(torch.autograd.grad(y.square().sum(), [x, *m.parameters()]), wanted, strict=True):
            assert_close({"x": a}, {"x": b}, 1e-6)

    @pytest.mark.parametrize(("dim", "heads"), [(30, 1), (42, 3)])
    def test_one_token_of_odd_width_is_exact(self, dim: int, heads: int):
        m, x = stir(FreeEnergyMixer(dim, heads, dtype=torch.float64)), noise(1, 1, dim)
        exact = outcome(m, m, x)
        assert_close(outcome(m.float(), m, x.float()), exact, 1e-5)

    @pytest.mark.parametrize("parts", ["L", "LG", "CL", "LT", "CLTG"])
    @pytest.mark.parametrize("length", [71, 300])
    def test_a_token_that_is_not_a_number_shows_in_every_later_one(self, parts: str, length: int):
        m, x = stir(FreeEnergyMixer(64, 2, parts=parts)), noise(3, length, 64, dtype=torch.float32)
        x[1, 50, 3] = torch.nan
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                y = m(x)
            assert y[1, 50:].isnan().all() and y[[0, 2]].isfinite().all()

    def test_the_number_of_threads_changes_rounding_only(self):
        """Tasks write to places of their own; sums over tasks are made in one order."""
        m, x, results = stir(FreeEnergyMixer(32, 4)), noise(67, 31, 32, dtype=torch.float32), []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                results.append(outcome(m, m, x))
        finally:
            torch.set_num_threads(before)
        assert_close(*results, 1e-5)

    @pytest.mark.parametrize("prior", ["softmax", "linear", "gla"])
    def test_an_encoder_with_grouped_heads_is_its_formula(self, prior: str):
        m, x = stir(FreeEnergyMixer(24, 6, prior, kv_heads=2, causal=False, dtype=torch.float64)), tokens()
        assert_close(outcome(m, m, x), outcome(m, lambda x: formula(m, x), x), 1e-9)

    @priors
    def test_one_row_repeated_is_read_once(self, prior: str):
        m, x = stir(FreeEnergyMixer(DIM, HEADS, prior, dtype=torch.float64)), tokens(batch=1)
        assert_close({"y": m(x.expand(5, -1, -1))}, {"y": m(x).expand(5, -1, -1)}, 1e-12)

    @pytest.mark.parametrize("prior", [name for name, kind in PRIORS.items() if not kind.one_temperature])
    def test_more_tokens_than_any_block_holds(self, prior: str):
        """550 tokens: blocks of rows, of keys and of the modulation all have several parts. (A prior over pairs of
        token and channel has no blocks, and too many pairs.)"""
        m, x = stir(FreeEnergyMixer(DIM, HEADS, prior, dtype=torch.float64)), tokens(batch=1, length=550)
        assert_close({"y": m(x)}, {"y": formula(m, x)}, 1e-9)

    @priors
    def test_the_mixer_says_what_it_is(self, prior: str):
        text = repr(FreeEnergyMixer(DIM, HEADS, prior, parts="LT"))
        assert f"prior={prior!r}" in text
        assert "parts='LT'" in text
