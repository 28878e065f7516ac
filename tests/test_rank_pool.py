"""The rank pool itself: results by rank, the first error, time limits, and layouts one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankFailure, RankPool, use_layout


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def _sum_of_ranks() -> int:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total)


def _tensor_rank(tensor: int) -> tuple[int, int]:
    from megatron.core import parallel_state

    use_layout(tensor=tensor)
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_world_size()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank is broken")
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _sleep() -> None:
    time.sleep(60)


def test_results_come_by_rank_and_layouts_change(pool):
    """Many cases run in the same processes, with other layouts and fewer ranks."""
    assert pool.run(_sum_of_ranks) == [3, 3]
    assert pool.run(_sum_of_ranks, ranks=1) == [1]
    assert pool.run(_tensor_rank, 2) == [(0, 1), (1, 1)]
    assert pool.run(_tensor_rank, 1) == [(0, 2), (0, 2)]


def test_ranks_work_in_a_folder_of_their_own(pool):
    """What a failing run leaves beside itself does not land in the repository."""
    for folder in pool.run(os.getcwd):
        assert Path(folder).name.startswith("rank_pool_")


def test_first_error_is_shown_and_the_pool_recovers(pool):
    """The rank that raises is named although the other one waits for it, and the next case works."""
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 raised first.*the second rank is broken"):
        pool.run(_fail_on_one, timeout_s=20)
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code 7"):
        pool.run(_die_on_one, timeout_s=20)
    assert pool.run(_sum_of_ranks) == [3, 3]


def test_time_is_limited(pool):
    """A case that hangs ends in its time and the message says where it stood."""
    with pytest.raises(RankFailure, match=r"(?s)ranks \[0, 1\] were not done after 1 s.*_sleep"):
        pool.run(_sleep, timeout_s=1)
