"""A rank that fails on its GPU takes the job down: the other one does not wait in NCCL for ever."""

from __future__ import annotations

import pytest

from tests.parallel.test_faults import FLAGS, assert_a_fault_ends_the_job


@pytest.mark.full
@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
@pytest.mark.parametrize(("fault", "shown"), [("raises", "a planted fault"), ("killed", "Signal 9 (SIGKILL)")])
def test_a_failing_rank_ends_the_job(tmp_path, cache, layout, fault, shown):
    """Within a minute of the fault both ranks are gone, the exit code is not 0 and the cause stands in the output."""
    assert_a_fault_ends_the_job(f"{FLAGS.replace('48', '64')} {layout}", tmp_path, cache, fault, shown)
