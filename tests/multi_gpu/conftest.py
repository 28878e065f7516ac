"""Two long-lived ranks, each with a GPU, for all tests here."""

from __future__ import annotations

import os

import pytest

from tests.parallel.parallel_cases import COMMON, LAYOUTS, LLAMA, Outcome, run_all
from tests.rank_pool import RankPool

# Deterministic mode reads this variable when CUDA starts; the pool's processes inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def pool():
    """Two ranks; runs make their own groups, over NCCL where there are GPUs."""
    with RankPool(2, timeout_s=240, method="spawn", runs_per_start=100) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Folder of the machine's measured rates, so that they are measured once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def train(pool, cache):
    """Run command lines in a layout on both ranks: a list of outcomes by rank for each."""
    model, common = LLAMA.replace("48", "64"), COMMON.replace("--offload-cpu-threads 1", "--offload-cpu-threads 4")

    def run(layout: str, lines: list[str], function=run_all, *arguments) -> list[list[Outcome]]:
        ranks, flags = LAYOUTS[layout]
        assert ranks == 2
        commands = [f"{model} {common} {flags} {line}" for line in lines]
        return [list(outcomes) for outcomes in zip(*pool.run(function, commands, cache, *arguments))]

    return run
