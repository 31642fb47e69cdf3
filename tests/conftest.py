"""Settings of all tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Before triton is imported: its kernels run on CPU tensors, statement by statement; the other is a warning less.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

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
