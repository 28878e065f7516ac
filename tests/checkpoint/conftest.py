"""One pool of ranks for all checkpoint tests: starting ranks takes longer than most of them."""

from __future__ import annotations

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool():
    """Four ranks; use `ranks=` for fewer."""
    with RankPool(4, timeout_s=120) as pool:
        yield pool
