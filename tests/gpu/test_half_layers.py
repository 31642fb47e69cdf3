"""Layers in half precision as a GPU runs them, with tokens handed to kernels as they come, in Triton's interpreter:
their errors are at most twice those of plain torch, which widens them first."""

import pytest
import torch
from torch import Tensor

import femixer.conditioner
import femixer.gates
import femixer.priors.base
import femixer.priors.softmax
from femixer import FreeEnergyMixer, use_backend
from femixer.priors import parse_prior

KINDS = ("softmax", "fox", "gla", "decay", "mamba:normalize=false", "mamba-interactive")
DIM, HEADS, LENGTH = 16, 2, 7


def run(layer: FreeEnergyMixer, x: Tensor, backend: str) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    with use_backend(backend):
        y = layer(x)
        leaves = dict(layer.named_parameters(), x=x)
        found = torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y).cumsum(1), allow_unused=True)
    return {"y": y.detach()} | {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


@pytest.mark.parametrize(("kind", "causal"), [*((kind, True) for kind in KINDS), ("decay", False), ("ssm", False)])
def test_half_precision_is_as_good_as_plain_torchs(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    name, options = parse_prior(kind)
    layer = FreeEnergyMixer(DIM, HEADS, name, causal=causal, prior_options=options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer, x = layer.half(), torch.randn(1, LENGTH, DIM).half()
    plain = run(layer, x, "plain")
    for module in (femixer.conditioner, femixer.gates, femixer.priors.base, femixer.priors.softmax):
        monkeypatch.setattr(module, "handed_dtype", lambda given: given.dtype)
    found = run(layer, x, "triton")
    wanted = run(layer.double(), x.double(), "plain")
    for which, exact in wanted.items():
        assert found[which].dtype == torch.float16
        scale = exact.abs().max().clamp_min(1.0)
        error, allowed = ((each[which].double() - exact).abs().max() / scale for each in (found, plain))
        assert error <= 2 * allowed + torch.finfo(torch.float16).eps, which
