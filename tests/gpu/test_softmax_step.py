"""The softmax step's GPU kernels in Triton's interpreter, against the definition; and what they launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.kernels import check, dispatch
from femixer.kernels.softmax import definition
from femixer.kernels.softmax_step import OPERATOR, examples, softmax_step
from femixer.kernels.triton_launch import recorded

EXAMPLES = examples()
SERVED = [name for name in EXAMPLES if "exponentials" not in name]


@pytest.mark.parametrize("name", SERVED)
def test_results_are_the_definitions(name: str) -> None:
    arguments = tuple(x.clone() if isinstance(x, Tensor) else x for x in EXAMPLES[name])
    assert check.compare(OPERATOR, "triton", arguments).results < 1e-5


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("segments", [False, True])
def test_tokens_one_by_one_are_the_whole_read(window: int | None, segments: bool) -> None:
    """Several splits of a long cache; the token is written to it."""
    length, room = 291, 300
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 4, 5), torch.randn(1, length, 2, 5), 20 * torch.randn(1, length, 2, 3)
    beta = torch.tensor([[0.5], [3.0]]).expand(2, 3).contiguous()
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[:, :100], ids[:, 250:270] = 7, -1
    keys, data = torch.full((1, 2, room, 5), torch.nan), torch.full((1, 2, room, 3), torch.nan)
    keys[:, :, : length - 1], data[:, :, : length - 1] = (x[:, :-1].transpose(1, 2) for x in (k, v))
    of = (ids[:, -1:], ids) if segments else None
    cache = keys, data, data[:, :, : length - 1].amax(2, keepdim=True)
    with use_backend("triton"), recorded() as launches:
        mean, free, shift, doubt = softmax_step(
            q, (k[:, -1:], v[:, -1:]), cache, beta, length, window=window, segments=of
        )
    assert [each.name for each in launches] == ["read_splits", "combine"]
    assert window or segments or launches[0].grid == (2 * 3,)
    seen = (ids[:, -1:], ids) if segments else (None, None)
    expected = definition(q, k, v, beta, None, *seen, True, window, 5**-0.5)
    for found, wanted in zip((mean, free), expected, strict=True):
        assert ((found - wanted).abs() / wanted.abs().clamp_min(1)).max() < 1e-5
    assert torch.equal(keys[:, :, length - 1], k[:, -1]) and torch.equal(data[:, :, length - 1], v[:, -1])
    assert torch.equal(shift[:, :, 0], v.amax(1)) and not doubt.any()
    assert keys[:, :, length:].isnan().all()


def test_a_cache_with_exponentials_is_refused() -> None:
    why = dispatch.refusal(OPERATOR, "triton", EXAMPLES["with exponentials"])
    assert why == "caches with exponentials are kept on a CPU only"


def test_no_sequences_are_no_launches() -> None:
    cache = torch.empty(0, 2, 7, 5), torch.empty(0, 2, 7, 3), torch.empty(0, 2, 1, 3)
    token = torch.empty(0, 1, 2, 5), torch.empty(0, 1, 2, 3)
    with use_backend("triton"), recorded() as launches:
        mean, *_ = softmax_step(torch.empty(0, 1, 4, 5), token, cache, torch.ones(2, 3), 7)
    assert mean.shape == (0, 1, 4, 3) and not launches


def test_launches_do_not_depend_on_the_length() -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    for length in (1, 50_000):
        cache = empty(2, 4, length, 64), empty(2, 4, length, 32), empty(2, 4, 1, 32)
        token = empty(2, 1, 4, 64), empty(2, 1, 4, 32)
        with use_backend("triton"), recorded() as launches:
            softmax_step(empty(2, 1, 8, 64), token, cache, empty(4, 32), length)
        assert [each.name for each in launches] == ["read_splits", "combine"]
