"""Linear attention of the baselines on every backend against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from femixer import use_backend
from femixer.baselines.kernels.chunks import CHUNK
from femixer.baselines.kernels.linear_attention import OPERATOR, definition, linear_attention
from femixer.kernels import check

from .backends import BACKENDS


@pytest.mark.parametrize("length", [1, 23, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("name", ["no decays", "per head", "per key channel", "per value channel"])
def test_chunks_of_any_number_and_length(length: int, name: str) -> None:
    q, k, v, gate, _, state, *options = check.page(OPERATOR).examples()[name]
    q, k, v, gate = (None if x is None else x.double()[:, :length] for x in (q, k, v, gate))
    y, last = linear_attention(q, k, v, gate, None, state.double(), *options)
    wanted = definition(q, k, v, gate, None, state, *options)
    torch.testing.assert_close((y, last), wanted, rtol=1e-12, atol=1e-12)


def per_channel(length: int) -> tuple[Tensor, ...]:
    q, k, v, gate, *_ = check.page(OPERATOR).examples()["per key channel"]
    return tuple(x[:, :length] for x in (q, k, v, gate))


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_is_all_at_once(backend: str) -> None:
    given = per_channel(41)
    with use_backend(backend), torch.no_grad():
        whole, last = linear_attention(*given)
        state, rows = None, []
        for t in range(41):
            y, state = linear_attention(*(x[:, t : t + 1] for x in given), None, state)
            rows.append(y)
    torch.testing.assert_close((torch.cat(rows, 1), state), (whole, last), rtol=1e-5, atol=1e-5)


def test_maps_and_gradients_as_functions() -> None:
    q, k, v, gate = per_channel(41)

    def loss(v: Tensor) -> Tensor:
        return linear_attention(q, k, v, gate)[0].square().sum()

    wanted = torch.autograd.grad(loss(v.requires_grad_()), v)[0]
    torch.testing.assert_close(torch.func.grad(loss)(v.detach()), wanted, rtol=1e-4, atol=1e-4)
    mapped = torch.vmap(torch.func.grad(loss))(torch.stack([v, v]).detach())
    torch.testing.assert_close(mapped[1], wanted, rtol=1e-4, atol=1e-4)
