"""Ranks whose shares change apart, after ten measured updates, end in the bits of the all-resident run."""

from __future__ import annotations

from tests.optimizer.follow_cases import one_rank_moves
from tests.parallel.parallel_cases import run_all

COMMON = "--bf16 --grad-reduce-in-bf16 --global-batch-size 4 --train-iters 13"
OVERLAPS = ("", "--overlap-grad-reduce --overlap-param-gather")


def test_ranks_move_apart(train):
    """Gathers that overlap and those that do not go on over the change of one rank; it leaves more to its CPU."""
    lines = [f"{COMMON} {overlap} --offload-resident-fraction" for overlap in OVERLAPS]
    resident = train("dp2", [f"{line} 1" for line in lines])
    moved = train("dp2", [f"{line} 0" for line in lines], run_all, one_rank_moves)
    for ranks, want in zip(moved, resident, strict=True):
        assert ranks[0].digest == want[0].digest and ranks[1].losses == want[1].losses
        assert all(outcome.replicas_agree for outcome in ranks)
        cpu = [outcome.traffic["cpu_params"] for outcome in ranks]
        assert cpu[0] > cpu[1] > 0
