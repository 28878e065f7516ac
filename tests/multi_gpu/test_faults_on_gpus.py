"""A rank that fails on its GPU takes the job down: the other one does not wait in NCCL for ever."""

from __future__ import annotations

import time

import pytest

from tests.parallel.test_faults import FLAGS, SCRIPT, torchrun


@pytest.mark.full
@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
@pytest.mark.parametrize(("fault", "shown"), [("raises", "a planted fault"), ("killed", "Signal 9 (SIGKILL)")])
def test_a_failing_rank_ends_the_job(tmp_path, cache, layout, fault, shown):
    """Within a minute of the fault both ranks are gone, the exit code is not 0 and the cause stands in the output."""
    moment = tmp_path / "moment"
    env = {"FAULT": fault, "FAULT_TIME": str(moment), "DEEP_OFFLOAD_CACHE": cache}
    done = torchrun(SCRIPT, f"{FLAGS.replace('48', '64')} {layout} --offload-resident-fraction 0", env)
    assert time.time() - float(moment.read_text()) < 60
    assert done.returncode != 0
    assert shown in done.stdout
    assert "iteration        2/" in done.stdout
