"""Long-lived ranks for all tests here."""

from __future__ import annotations

import pytest

from tests.parallel.parallel_cases import COMMON, LAYOUTS, LLAMA, Outcome, run_all
from tests.rank_pool import RankPool

Outcomes = list[list[Outcome]]
"""Of each command line, by rank."""


@pytest.fixture(scope="session")
def pools():
    """Ranks -> pool; only the one asked for last has processes."""
    made: dict[int, RankPool] = {}

    def get(ranks: int) -> RankPool:
        if ranks not in made:
            # A run holds several trainings, and gloo's threads of each live on: the more ranks, the sooner a new start.
            made[ranks] = RankPool(ranks, timeout_s=240, runs_per_start=max(1, 8 // ranks))
        for other, pool in made.items():
            if other != ranks:
                pool.close()
        return made[ranks]

    yield get
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Folder of the machine's measured rates, so that they are measured once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def train(pools, cache):
    """Run command lines in a layout on long-lived ranks: a list of outcomes by rank for each."""

    def run(
        layout: str, lines: list[str], function=run_all, *arguments, model: str = LLAMA, common: str = COMMON
    ) -> Outcomes:
        ranks, flags = LAYOUTS[layout]
        commands = [f"{model} {common} {flags} {line}" for line in lines]
        by_rank = pools(ranks).run(function, commands, cache, *arguments)
        return [list(outcomes) for outcomes in zip(*by_rank)]

    return run
