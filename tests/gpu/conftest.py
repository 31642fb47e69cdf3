"""All tests of kernels watch what these do with memory."""

from collections.abc import Iterator

import pytest

from .memory import watched


@pytest.fixture(autouse=True)
def memory() -> Iterator[list[str]]:
    with watched() as names:
        yield names
