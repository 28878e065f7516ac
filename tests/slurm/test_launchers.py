"""torchrun inside SLURM tasks: as many launchers as tasks, or the run is refused. Needs no SLURM."""

from __future__ import annotations

import pytest

from megatron.training.launch import find_ranks

TORCHRUN = dict(
    RANK="1",
    WORLD_SIZE="8",
    LOCAL_RANK="1",
    LOCAL_WORLD_SIZE="8",
    MASTER_ADDR="n0",
    MASTER_PORT="29500",
    GROUP_WORLD_SIZE="1",
)
STEP = dict(SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1")


def test_one_launcher_a_task():
    """One torchrun in one task, and two that count two nodes in two tasks, are as they should be."""
    assert find_ranks({**TORCHRUN, **STEP}).rank == 1
    two = dict(WORLD_SIZE="16", GROUP_WORLD_SIZE="2", SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2")
    assert find_ranks({**TORCHRUN, **STEP, **two}).world_size == 16


@pytest.mark.parametrize("launchers, tasks", [(1, 8), (1, 2), (2, 16)])
def test_launchers_that_would_train_alone(launchers, tasks):
    """torchrun once a GPU, or without --nnodes on several nodes, would train the same model several times."""
    env = {
        **TORCHRUN,
        **STEP,
        "GROUP_WORLD_SIZE": str(launchers),
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": str(tasks),
    }
    sentence = (
        rf"^SLURM started {tasks} tasks, but this torchrun counts {launchers} \(--nnodes\): each would train alone, "
    )
    with pytest.raises(ValueError, match=sentence):
        find_ranks(env)


def test_batch_script_is_no_task():
    """A torchrun that the batch script starts itself belongs to no step and is not counted."""
    assert find_ranks({**TORCHRUN, "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).world_size == 8
