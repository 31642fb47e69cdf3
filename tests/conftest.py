"""Settings of all tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The tests run two processes side by side; threads would only make them wait for each other.
torch.set_num_threads(1)

# Examples are a function of the test, so a failure is there again at the next run; times depend on the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def little_garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks collect garbage before every sample, which with all that pytest holds takes longer than the rest."""
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    unfreeze()
