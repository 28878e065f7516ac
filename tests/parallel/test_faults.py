"""A rank that fails takes the job down soon, with the first error shown; too few cores are said once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deep_offload.runtime.limits import fair_cores
from tests.parallel.parallel_cases import COMMON, LLAMA

SCRIPT = str(Path(__file__).with_name("faulty_rank.py"))
FLAGS = f"{LLAMA} {COMMON} --bf16 --train-iters 5 --global-batch-size 4 --overlap-grad-reduce --offload-gpu-share 0.5"


def torchrun(
    folder: Path, script: str, flags: str, env: dict[str, str], prefix: tuple[str, ...] = (), ranks: int = 2
) -> subprocess.CompletedProcess:
    """Ranks of this machine in `folder`, where a failing one leaves its post-mortem; output and errors together."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.run(
        [*prefix, *launcher, script, *flags.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )


def assert_a_fault_ends_the_job(flags, tmp_path, cache, fault, shown):
    moment = tmp_path / "moment"
    env = {"FAULT": fault, "FAULT_TIME": str(moment), "DEEP_OFFLOAD_CACHE": cache}
    done = torchrun(tmp_path, SCRIPT, f"{flags} --offload-resident-fraction 0", env)
    assert time.time() - float(moment.read_text()) < 60
    assert done.returncode != 0
    assert shown in done.stdout
    assert "iteration        2/" in done.stdout


@pytest.mark.parametrize("layout", ["", pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.full)])
@pytest.mark.parametrize(("fault", "shown"), [("raises", "a planted fault"), ("killed", "Signal 9 (SIGKILL)")])
def test_a_failing_rank_ends_the_job(tmp_path, cache, layout, fault, shown):
    """Within a minute of the fault all ranks are gone, the exit code is not 0 and the cause stands in the output."""
    assert_a_fault_ends_the_job(f"{FLAGS} {layout}", tmp_path, cache, fault, shown)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), pytest.param(8, 2, marks=pytest.mark.full)])
def test_too_few_cores_are_said_once(tmp_path, cache, ranks, cores):
    """2 ranks pinned to one core, 8 ranks on two: one warning with cores per rank and the predicted cost."""
    script = str(Path(SCRIPT).parents[2] / "pretrain_gpt.py")
    pinned = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    flags = f"{FLAGS} --train-iters 2 --global-batch-size 8 --offload-resident-fraction 0"
    done = torchrun(tmp_path, script, flags, {"DEEP_OFFLOAD_CACHE": cache}, ("taskset", "-c", pinned), ranks)
    assert done.returncode == 0, done.stdout[-2000:]
    warnings = [line for line in done.stdout.splitlines() if "cores per rank" in line]
    assert len(warnings) == 1
    assert f"{cores / ranks:.2g} cores per rank" in warnings[0] and "predicted" in warnings[0]


@pytest.mark.parametrize(
    ("mine", "everyone", "cores"),
    [
        ({0, 1}, [{0, 1}] * 8, 0.25),
        ({3}, [{2}, {3}], 1.0),
        ({0}, [{0}, {0}], 0.5),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}, {2, 3}], 3.0),
    ],
)
def test_share_of_the_cores(mine, everyone, cores):
    """A core counts for as many ranks as may run on it: 8 ranks on 2 cores, ranks pinned apart, to one, overlapping."""
    assert fair_cores(mine, everyone) == cores
