"""A single rank's communicators: those that are started before state is placed are those that training needs."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

sys.path.insert(0, str(Path(__file__).parent))
from loop_cases import train

from megatron.training import initialize


@pytest.mark.parametrize("flags", ["--bf16 --grad-reduce-in-bf16 --overlap-grad-reduce", ""], ids=["bf16", "fp32"])
def test_a_run_communicates_in_the_groups_that_were_started(flags):
    """Every collective from the first step to the last is in a group whose communicator was there before."""
    used, started, ask = set(), set(), c10d._rank_not_in_group
    into = [None]

    def noted(group):
        asks_only = sys._getframe(1).f_code.co_name in ("get_rank", "get_world_size")
        if into[0] is not None and not asks_only:
            into[0].add((group or c10d.GroupMember.WORLD).group_name)
        return ask(group)

    def first(_optimizer):
        if not started:
            into[0] = started
            initialize._start_communicators(torch.device("cpu"))
        into[0] = used

    with mock.patch.object(c10d, "_rank_not_in_group", noted):
        train(f"{flags} --train-iters 3 --global-batch-size 4 --offload-resident-fraction 0", before_step=first)
    assert len(started) == 4 and used == started
