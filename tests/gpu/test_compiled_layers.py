"""torch.compile(fullgraph=True) of layers on Triton's kernels, interpreted: training and decoding."""

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.kernels.triton_launch import recorded
from femixer.priors import parse_prior

DIM, HEADS, LENGTH = 16, 2, 13
KINDS = ("softmax", "fox", "linear", "gla:decay=channel", "aft", "decay", "ssm", "mamba", "mamba-interactive")


@pytest.fixture(autouse=True)
def memory() -> None:
    """Not watched: a compiler would take the watch for a part of the layer."""


def layer(kind: str) -> FreeEnergyMixer:
    name, options = parse_prior(kind)
    torch.manual_seed(0)
    return FreeEnergyMixer(DIM, HEADS, name, prior_options=options)


def outcome(mixer: FreeEnergyMixer, call: object, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = call(x)  # type: ignore[operator]
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, *mixer.parameters()))]


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_equals_eager(kind: str) -> None:
    torch._dynamo.reset()
    mixer = layer(kind)
    x = torch.randn(1, LENGTH, DIM)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    with use_backend("triton"):
        with recorded() as launches:
            found = outcome(mixer, compiled, x)
        assert launches, "no kernel of Triton's was launched"
        for ours, expected in zip(found, outcome(mixer, mixer, x), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "gla:decay=channel", "aft", "mamba"])
def test_decoding_is_compiled_once_for_all_tokens(kind: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mixer = layer(kind)
    x = torch.randn(1, LENGTH, DIM)
    step = torch.compile(lambda x, state: mixer(x, state=state, return_state=True), fullgraph=True, backend="aot_eager")
    with use_backend("triton"), torch.no_grad():
        whole = mixer(x)
        _, state = mixer(x[:, :5], return_state=True)
        seen = []
        for t in range(5, LENGTH):
            y, state = step(x[:, t : t + 1], state)
            torch.testing.assert_close(y, whole[:, t : t + 1], rtol=1e-4, atol=1e-5)
            seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert seen[-1] == seen[4], seen  # the first tokens settle which numbers are variables
