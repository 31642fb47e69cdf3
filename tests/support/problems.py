"""Random reads in float64, of which the tests of the paper's propositions ask."""

from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

property_test = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


class Problem(NamedTuple):
    p: Tensor  # [T, S], a distribution over S
    v: Tensor  # [S, D]
    beta: Tensor  # [D], positive
    lam: Tensor  # [T, D], in (0, 1)
    generator: torch.Generator  # for whatever else a test has to draw


@st.composite
def problems(draw: st.DrawFn, coldest: float = 4.0) -> Problem:
    """Sizes are different primes, so that mixed-up axes fail. coldest: up to 4 no posterior underflows, so that
    KL(p || q) is finite."""
    t, s, d = draw(st.permutations([3, 5, 7, 11]))[:3]
    generator = generator_of(draw(seeds))
    p = (draw(st.sampled_from([0.3, 1.0, 3.0])) * normal(generator, t, s)).softmax(-1)
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    beta = draw(st.sampled_from([0.1, coldest**0.5, coldest])) / scale * (0.4 * normal(generator, d)).exp()
    return Problem(p, scale * normal(generator, s, d), beta, normal(generator, t, d).sigmoid(), generator)


def of_problems(*more: st.SearchStrategy[Any], coldest: float = 4.0) -> Any:
    """A property of random problems, and of what `more` draws."""
    return lambda test: property_test(given(problems(coldest), *more)(test))


def of_seeds(*more: st.SearchStrategy[Any]) -> Any:
    """A property of what a seed, and `more`, draw."""
    return lambda test: property_test(given(seeds, *more)(test))


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
