"""Settings of the pruning tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwise.timing import one_thread


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    """Tiny models are slower on two threads than on one."""
    with one_thread():
        yield
