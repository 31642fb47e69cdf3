"""Random numbers as a function of a seed and of what they are for, so that nothing depends on what was drawn before."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from femixer.training.distributed import Part


def derive(seed: int, *purpose: str | int) -> int:
    """A 64-bit seed for one purpose, e.g. `derive(0, "train", step)`."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator for one purpose: equal arguments give equal numbers, other arguments unrelated ones."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Inside, torch's own generator is one for this purpose: what is built depends on nothing that was drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, *purpose))
        yield


class Epochs:
    """The numbers 0 to count - 1 in an order of each epoch's own, as a function of the step: 1, 2, ...

    An epoch has ceil(count / batch) steps of equally many numbers, or one less. A short rest at the end instead, as
    loaders make it (even=False), may be a single example, and that step would count like any other.
    """

    def __init__(
        self, count: int, batch: int, seed: int, order: Callable[[int], Tensor] | None = None, even: bool = True
    ) -> None:
        """order: epoch -> the numbers [count] in its order, by default a permutation that the seed decides."""
        self.count, self.seed, self.batch = count, seed, None if even else batch
        self.per_epoch = math.ceil(count / batch)
        self.order = functools.lru_cache(maxsize=1)(order or self._order)

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=generator(self.seed, "order", epoch))

    def __call__(self, step: int, part: Part) -> Tensor:
        """The numbers of one part of the global batch of a step."""
        epoch, index = divmod(step - 1, self.per_epoch)
        begin, end = (self.batch * at if self.batch else self.count * at // self.per_epoch for at in (index, index + 1))
        numbers = self.order(epoch)[begin:end]
        return numbers[part.rows(len(numbers))]

    def epoch(self, step: int) -> int:
        """From 0."""
        return (step - 1) // self.per_epoch
