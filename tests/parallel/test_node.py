"""What a rank may use of its node, whatever the launcher says of it."""

from __future__ import annotations

import os

import pytest


def _place(variables: dict[str, str]) -> tuple[float, int]:
    from deep_offload.optimizer import factory

    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    return factory._place_on_node()


@pytest.mark.parametrize("variables", [{}, {"LOCAL_WORLD_SIZE": "2"}], ids=["not told", "told"])
def test_ranks_of_a_node_are_counted(pools, variables):
    """`srun` without --ntasks-per-node tells no rank how many share its memory and cores: the ranks tell each other."""
    cores = len(os.sched_getaffinity(0))
    assert pools(2).run(_place, variables) == [(cores / 2, 2)] * 2
    assert pools(2).run(_place, {}, ranks=1) == [(cores, 1)]
