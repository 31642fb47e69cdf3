"""Mixers under torch.func, and modules whose forward, parameters or surroundings somebody has changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from matrix import assert_close, noise, stir
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS

priors = pytest.mark.parametrize("prior", PRIORS)
NARROW, WIDE = 24, 320  # few features of the conditioner, and many


def linears(m: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in m.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def loss_of(m: FreeEnergyMixer, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    y = functional_call(m, parameters, (x,))
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()


class TestTransforms:
    @priors
    @pytest.mark.parametrize("causal", [True, False])
    def test_grad_is_autograds(self, prior: str, causal: bool):
        m, x = stir(FreeEnergyMixer(16, 2, prior, causal=causal, dtype=torch.float64)), noise(2, 11, 16)
        parameters = dict(m.named_parameters())
        wanted = torch.autograd.grad(loss_of(m, parameters, x), list(parameters.values()))
        found = grad(lambda p: loss_of(m, p, x))({name: p.detach() for name, p in parameters.items()})
        assert_close(found, dict(zip(parameters, wanted, strict=True)), 1e-9)

    @priors
    def test_second_derivatives_are_those_of_the_gradient(self, prior: str):
        m, x = stir(FreeEnergyMixer(16, 2, prior, dtype=torch.float64)), noise(1, 7, 16)
        direction, gradient = noise(1, 7, 16, seed=2), grad(lambda x: m(x).square().sum())
        found = grad(lambda x: (gradient(x) * direction).sum())(x)
        step = 1e-5 * direction
        assert_close({"x": found}, {"x": (gradient(x + step) - gradient(x - step)) / 2e-5}, 1e-6)
        # Kernels have first derivatives only. Constants instead of them would make zeros of the second, in silence.
        with pytest.raises(RuntimeError, match="create_graph=True is not possible"):
            torch.autograd.functional.hvp(lambda x: m(x).square().sum(), x, direction)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated")  # by torch, for derivatives forward in time
    @priors
    @pytest.mark.parametrize("marked", [False, True])
    def test_forward_derivatives_of_long_sequences(self, prior: str, marked: bool):
        torch.manual_seed(0)
        m, x, direction = FreeEnergyMixer(8, 2, prior, dtype=torch.float64), noise(1, 300, 8), noise(1, 300, 8, seed=2)
        segments = torch.arange(300)[None] // 170 if marked else None
        gradient = grad(lambda x: m(x, segments=segments).square().sum())
        for function in (lambda x: m(x, segments=segments), gradient):
            _, found = jvp(function, (x,), (direction,))
            step = 1e-7 * direction  # small, because features of linear and gla have a kink
            assert_close({"x": found}, {"x": (function(x + step) - function(x - step)) / 2e-7}, 1e-5)

    @priors
    def test_gradients_per_example_are_those_of_each_alone(self, prior: str):
        m, x = stir(FreeEnergyMixer(16, 2, prior, dtype=torch.float64)), noise(3, 7, 16)
        parameters = {name: p.detach() for name, p in m.named_parameters()}
        found = vmap(grad(lambda p, x: loss_of(m, p, x[None])), in_dims=(None, 0))(parameters, x)
        alone = [grad(lambda p, x=x: loss_of(m, p, x[None]))(parameters) for x in x]
        assert_close(found, {name: torch.stack([g[name] for g in alone]) for name in parameters}, 1e-9)

    @priors
    def test_an_ensemble_is_its_members(self, prior: str):
        members = [stir(FreeEnergyMixer(16, 2, prior, dtype=torch.float64), seed) for seed in (1, 2, 3)]
        x = noise(2, 7, 16)
        stacked = {
            name: torch.stack([dict(m.named_parameters())[name].detach() for m in members])
            for name in members[0].state_dict()
        }
        found = vmap(lambda p: functional_call(members[0], p, (x,)))(stacked)
        assert_close({"y": found}, {"y": torch.stack([m(x).detach() for m in members])}, 1e-9)

    @priors
    def test_the_jacobian_in_a_parameter(self, prior: str):
        m, x = stir(FreeEnergyMixer(8, 2, prior, dtype=torch.float64)), noise(1, 3, 8)
        bias = m.value_proj.linear.bias.detach()
        found = jacrev(lambda b: functional_call(m, {"value_proj.linear.bias": b}, (x,)))(bias)
        wanted = torch.autograd.functional.jacobian(
            lambda b: functional_call(m, {"value_proj.linear.bias": b}, (x,)), bias
        )
        assert_close({"J": found}, {"J": wanted}, 1e-9)


class TestModules:
    @priors
    @pytest.mark.parametrize("dim", [NARROW, WIDE])
    @pytest.mark.parametrize("recorded", [True, False])
    def test_hooks_of_every_linear_map_see_and_change_its_result(self, prior: str, dim: int, recorded: bool):
        m, x = stir(FreeEnergyMixer(dim, 2, prior)), noise(2, 9, dim, dtype=torch.float32)
        with torch.set_grad_enabled(recorded):
            wanted = m(x)
            for name, linear in linears(m):
                seen: list[tuple[Tensor, Tensor]] = []
                handle = linear.register_forward_hook(lambda _, __, y, seen=seen: seen.append((y, y.clone())))
                assert_close({"y": m(x)}, {"y": wanted}, 1e-6)
                handle.remove()
                assert len(seen) == 1, name
                assert torch.equal(*seen[0]), f"{name}: what a hook kept was changed later"
                handle = linear.register_forward_hook(lambda _, __, y: y + 1)
                assert (m(x) - wanted).abs().max() > 1e-4, name
                handle.remove()

    @priors
    @pytest.mark.parametrize("dim", [NARROW, WIDE])
    def test_every_parametrized_weight_learns(self, prior: str, dim: int):
        m, x = stir(FreeEnergyMixer(dim, 2, prior)), noise(2, 9, dim, dtype=torch.float32)
        wanted = m(x)
        for _, linear in list(linears(m)):
            weight_norm(linear)
        assert_close({"y": m(x)}, {"y": wanted}, 1e-5)
        m(x).square().sum().backward()
        for name, parameter in m.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name

    @priors
    @pytest.mark.parametrize("dim", [NARROW, WIDE])
    def test_a_parametrization_of_every_linear_map_is_used(self, prior: str, dim: int):
        class Twice(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return 2 * weight

        m, x = stir(FreeEnergyMixer(dim, 2, prior)), noise(2, 9, dim, dtype=torch.float32)
        names = [name for name, _ in linears(m)]
        for name in names:
            parametrize.register_parametrization(m.get_submodule(name), "weight", Twice())
        twice = m(x)
        for name in names:
            parametrize.remove_parametrizations(m.get_submodule(name), "weight")
        assert_close({"y": twice}, {"y": m(x)}, 1e-6)

    @priors
    @pytest.mark.parametrize("recorded", [True, False])
    def test_what_takes_the_place_of_a_module_s_forward_is_called(self, prior: str, recorded: bool):
        m, x = stir(FreeEnergyMixer(NARROW, 2, prior)), noise(2, 71, NARROW, dtype=torch.float32)
        with torch.set_grad_enabled(recorded):
            wanted = m(x)
            for name, part in m.named_modules():
                calls: list[str] = []
                if not name or not list(part.parameters()):
                    continue
                inner = part.forward
                part.forward = lambda *args, inner=inner, calls=calls: (calls.append(""), inner(*args))[1]
                assert_close({"y": m(x)}, {"y": wanted}, 1e-6)
                assert len(calls) == 1, name
                del part.forward

    def test_an_adapter_in_place_of_a_linear_map_is_used_and_learns(self):
        """As LoRA's: the map and a product of two narrow ones."""

        class Adapter(nn.Module):
            def __init__(self, base: nn.Linear) -> None:
                super().__init__()
                self.base = base.requires_grad_(False)
                self.down = nn.Linear(base.in_features, 2, bias=False)
                self.up = nn.Linear(2, base.out_features, bias=False)

            @property
            def weight(self) -> Tensor:
                return self.base.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.base(x) + self.up(self.down(x))

        torch.manual_seed(0)
        m, x = stir(FreeEnergyMixer(NARROW, 2)), noise(2, 9, NARROW, dtype=torch.float32)
        for name, linear in list(linears(m)):
            m.set_submodule(name, Adapter(linear))
        adapted = m(x)
        adapted.square().sum().backward()
        adapters = [(name, part) for name, part in m.named_modules() if isinstance(part, Adapter)]
        assert len(adapters) == 4
        for name, adapter in adapters:
            for part in (adapter.down, adapter.up):
                assert part.weight.grad.abs().max() > 0, name
            with torch.no_grad():
                adapter.base.weight.add_(adapter.up.weight @ adapter.down.weight)
            m.set_submodule(name, adapter.base)
        assert_close({"y": m(x)}, {"y": adapted}, 1e-5)


@pytest.mark.parametrize("prior", ["gla", "aft", "mamba"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, at its first dual level
def test_forward_mode_gradients_are_those_of_finite_differences(prior: str):
    m, x, direction = FreeEnergyMixer(16, 2, prior, dtype=torch.float64), noise(2, 11, 16), noise(2, 11, 16, seed=5)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        y = m(torch.autograd.forward_ad.make_dual(x, direction))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
        assert tangent is not None
    with torch.no_grad():
        wanted = (m(x + 1e-6 * direction) - m(x - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(tangent, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prior", ["softmax", "gla", "aft"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_mixer_is_the_mixer(prior: str):
    m, x = stir(FreeEnergyMixer(16, 2, prior)).eval(), noise(2, 11, 16, dtype=torch.float32)
    traced = torch.jit.trace(m, (x,), check_trace=False)
    other = noise(2, 11, 16, dtype=torch.float32, seed=9)
    torch.testing.assert_close(traced(other), m(other), rtol=1e-4, atol=1e-5)
