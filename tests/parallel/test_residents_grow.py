"""Ranks that let different numbers of subgroups stay after three steps end in the bits of the all-resident run."""

from __future__ import annotations

import pytest

from tests.optimizer.residency_cases import one_rank_grows_more
from tests.parallel.parallel_cases import run_all

COMMON = "--bf16 --grad-reduce-in-bf16 --global-batch-size 4 --train-iters 6 --offload-gpu-share 0.5"
OVERLAPS = ("", "--overlap-grad-reduce --overlap-param-gather")


def test_ranks_grow_apart(train):
    """Gathers that overlap and those that do not go on over the change; later steps move fewer bytes."""
    lines = [f"{COMMON} {overlap}" for overlap in OVERLAPS]
    fixed = train("dp2", [f"{line} --offload-resident-fraction {r}" for line in lines for r in (1, 0)])
    grown = train("dp2", [f"{line} --offload-resident-fraction auto" for line in lines], run_all, one_rank_grows_more)
    for i, ranks in enumerate(grown):
        resident, none = fixed[2 * i], fixed[2 * i + 1]
        assert ranks[0].digest == resident[0].digest == none[0].digest
        assert ranks[1].losses == resident[1].losses
        assert all(outcome.replicas_agree for outcome in ranks)
        moved = [outcome.traffic["h2d_bytes"] for outcome in ranks]
        assert 0 < 1.9 * moved[0] < 1.9 * moved[1] < 1.9 * none[1].traffic["h2d_bytes"]
        assert moved[0] == pytest.approx(none[0].traffic["h2d_bytes"] / 2, rel=0.2)
