"""The gated softmax read's GPU kernels in Triton's interpreter, against the definition; launches and kept memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.kernels import check
from femixer.kernels.gated_softmax import OPERATOR, examples, gated_softmax_read
from femixer.kernels.triton_launch import recorded

EXAMPLES = examples()


def tokens(name: str, count: int) -> tuple[object, ...]:
    """The first tokens of one sequence of an example."""

    def cut(i: int, x: object) -> object:
        if not isinstance(x, Tensor) or i == 3:
            return x
        if i == 6:  # sums of decays before the tokens, and up to them
            return torch.cat([sums[..., :count] for sums in x[:1].chunk(2, 2)], 2)
        return x[:1, :count]

    return tuple(cut(i, x) for i, x in enumerate(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_and_gradients_are_the_definitions(name: str) -> None:
    errors = check.compare(OPERATOR, "triton", tokens(name, 13))
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


def test_several_tiles_with_a_flagged_row_are_the_definition() -> None:
    errors = check.compare(OPERATOR, "triton", tokens("far apart", 37))
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


def test_a_layer_is_the_same_as_in_plain_torch() -> None:
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(12, 2)
    x = torch.randn(2, 7, 12)
    with use_backend("plain"):
        expected = mixer(x)
    with use_backend("triton"):
        y = mixer(x)
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max().clamp_min(1)


def test_launches_and_kept_memory() -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    q, k, v, lam, gate = (empty(1, 4096, 8, width) for width in (64, 64, 32, 32, 32))
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with use_backend("triton"), recorded() as launches, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = gated_softmax_read(q, k, v, empty(8, 32), (lam, gate), 1e-6)
        forward = len(launches)
        y.backward(torch.empty_like(y))
    assert (forward, len(launches) - forward) == (4, 4)
    # q and k are twice as wide as v, lam, gate, mean and F; per row there is one number and a flag, tops are few.
    assert sum(x.numel() * x.element_size() for x in kept) < 9.5 * v.numel() * 4
