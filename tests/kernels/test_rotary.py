"""Rotary positions and their angles on every backend against their definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.baselines import Attention
from femixer.kernels import check
from femixer.kernels.rotary import rotate
from femixer.kernels.rotary_angles import OPERATOR as ANGLES
from femixer.kernels.rotary_angles import rotary_angles
from femixer.rotary import Rotation, rotated

from .backends import BACKENDS, examples


@examples(ANGLES)
def test_angles_are_the_definitions_at_any_distance(
    arguments: tuple[Any, ...], backend: str, dtype: torch.dtype
) -> None:
    errors = check.compare(ANGLES, backend, arguments)
    # Arguments of a million are rounded to 1e-10 before the cosine.
    assert errors.worst < (1e-7 if arguments[-1] == torch.float32 else 1e-9), errors


def heads(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_rotation_keeps_norms_and_products() -> None:
    """Orthogonal for every position, and the identity at the first."""
    q, k = heads(0, 2, 11, 3, 10), heads(1, 2, 11, 3, 10)
    found_q, found_k = rotate(q, k, *rotary_angles(torch.arange(11)[None], 10, 10000.0, torch.float64))
    torch.testing.assert_close(found_q.norm(dim=-1), q.norm(dim=-1), rtol=1e-14, atol=0)
    torch.testing.assert_close((found_q * found_k).sum(-1), (q * k).sum(-1), rtol=0, atol=1e-13)
    assert torch.equal(found_q[:, 0], q[:, 0])
    assert (found_q[:, 1:] - q[:, 1:]).abs().amin((0, 1, 2)).min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("floor", [None, 1e-3])
def test_heads_and_gradients_may_lie_anywhere_in_memory(backend: str, floor: float | None) -> None:
    """A gradient that is one number has strides of zero."""
    q, k = (heads(seed, 2, 11, 8, 3).float().mT.requires_grad_() for seed in (0, 1))
    angles = rotary_angles(torch.arange(11)[None], 8, 10000.0, torch.float32)
    results = []
    for given in ((q, k), [x.detach().contiguous().requires_grad_() for x in (q, k)]):
        with use_backend(backend):
            found = rotate(*given, *angles, floor)
            loss = sum(x.sum() if given[0] is q else (x * torch.ones_like(x)).sum() for x in found)
        results.append([*found, *torch.autograd.grad(loss, given)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = (heads(seed, 1, 1, 1, 8).expand(1, 13, 1, 8) for seed in (0, 1))
    q, k = rotate(q, k, *rotary_angles(torch.arange(13)[None], 8, 10000.0, torch.float64))
    scores = torch.einsum("bthe,bshe->ts", q, k)
    for distance in range(-12, 13):
        diagonal = scores.diagonal(distance)
        assert diagonal.max() - diagonal.min() < 1e-13
    assert scores[0].unique().numel() == 13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 67])
def test_scores_of_distant_tokens_are_as_good_as_those_of_near_ones(backend: str, tokens: int) -> None:
    q, k = (heads(seed, 1, 1, 24).float().expand(1, tokens, 24) for seed in (0, 1))
    scores = []
    with use_backend(backend), torch.no_grad():
        for distance in (0, 1_000_000):
            position = torch.arange(distance, distance + tokens)[None]
            later, _ = rotated(q, k, Rotation(position + 7, 8, 10000.0), torch.float32)
            _, earlier = rotated(q, k, Rotation(position, 8, 10000.0), torch.float32)
            scores.append((later * earlier).sum(-1))
    torch.testing.assert_close(scores[1], scores[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_by_itself_is_rotated_as_among_others(backend: str) -> None:
    q, k, position = torch.randn(2, 71, 32), torch.randn(2, 71, 16), torch.arange(71)[None]
    with use_backend(backend), torch.no_grad():
        whole = rotated(q, k, Rotation(position, 16, 10000.0, 1e-6), torch.float32)
        alone = rotated(q[:, 70:], k[:, 70:], Rotation(position[:, 70:], 16, 10000.0, 1e-6), torch.float32)
    for a, b in zip(alone, whole, strict=True):
        torch.testing.assert_close(a, b[:, 70:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_are_at_least_their_floor_and_what_is_not_a_number_propagates(backend: str) -> None:
    q, k = torch.randn(1, 5, 24), torch.randn(1, 5, 8)
    q[0, 2, 3] = torch.nan
    with use_backend(backend):
        found, _ = rotated(q, k, Rotation(torch.arange(5)[None], 8, 10000.0, 1e-6), torch.float32)
    assert found[0, 2, 0, 2:4].isnan().all()
    assert (found[0, :, 1:] >= 1e-6).all()
    assert (found[0, :, 1:] == 1e-6).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("floor", [None, 1e-6])
def test_queries_and_keys_are_not_kept_for_gradients(backend: str, floor: float | None) -> None:
    """What is kept are the results, which a read keeps anyway, and the angles."""
    q, k, kept = torch.randn(1, 5, 24, requires_grad=True), torch.randn(1, 5, 8, requires_grad=True), []
    with (
        use_backend(backend),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        rotated(q, k, Rotation(torch.arange(5)[None], 8, 10000.0, floor), torch.float32)
    assert kept
    assert not {x.data_ptr() for x in kept} & {q.data_ptr(), k.data_ptr()}


@pytest.mark.parametrize("floor", [None, 1e-6])
def test_a_transform_and_a_compiler_see_through_it(floor: float | None) -> None:
    q, k, rotation = torch.randn(3, 2, 5, 24), torch.randn(3, 2, 5, 8), Rotation(torch.arange(5)[None], 8, 10.0, floor)
    wanted = [rotated(a, b, rotation, torch.float32) for a, b in zip(q, k, strict=True)]
    found = torch.func.vmap(lambda a, b: rotated(a, b, rotation, torch.float32))(q, k)
    traced = torch.compile(lambda a, b: rotated(a, b, rotation, torch.float32), backend="aot_eager", fullgraph=True)
    for n, pair in enumerate(wanted):
        for a, b, c in zip(pair, found, traced(q[n], k[n]), strict=True):
            torch.testing.assert_close(b[n], a, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(c, a, rtol=1e-6, atol=1e-6)


def test_low_precision_is_rotated_in_float32() -> None:
    q, k, rotation = torch.randn(2, 5, 24), torch.randn(2, 5, 8), Rotation(torch.arange(5)[None] + 999, 8, 10.0)
    q, k = q.bfloat16(), k.bfloat16()
    for low, exact in zip(rotated(q, k, rotation, torch.bfloat16), rotated(q, k, rotation, torch.float32), strict=True):
        assert low.dtype == torch.bfloat16
        assert torch.equal(low, exact.bfloat16())


def test_attention_decodes_the_same_on_every_backend() -> None:
    torch.manual_seed(0)
    layer, x = Attention(28, 2, kv_heads=1), torch.randn(3, 13, 28)
    with torch.no_grad():
        whole = layer(x)
        for backend in BACKENDS:
            with use_backend(backend):
                _, state = layer(x[:, :12], return_state=True)
                y, _ = layer(x[:, 12:], state=state, return_state=True)
            torch.testing.assert_close(y, whole[:, 12:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 67])
def test_angles_that_are_kept_serve_training_though_made_in_inference_mode(tokens: int) -> None:
    position = torch.arange(31, 31 + tokens)[None]
    q, k, rotation = torch.randn(1, tokens, 8), torch.randn(1, tokens, 8), Rotation(position, 8, 77.0)
    with torch.inference_mode():
        rotated(q, k, rotation, torch.float32)
    rotated(q.requires_grad_(), k, rotation, torch.float32)[0].sum().backward()
    assert q.grad is not None
