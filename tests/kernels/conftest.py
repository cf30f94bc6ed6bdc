"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest

from lmoffload.kernels.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool
