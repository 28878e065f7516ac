"""Who this process is, from torchrun's, SLURM's or no variables, and what is refused."""

from __future__ import annotations

import pytest

from megatron.training.launch import Ranks, find_ranks, first_host

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[03,07-09]",
    "SLURM_JOB_ID": "1000",
}


def test_single_process():
    """Without variables this is a job of one."""
    assert find_ranks({}) == Ranks(0, 1, 0, 1, "127.0.0.1", 0, "single")


def test_torchrun_comes_first():
    """torch's variables decide, and under srun with one task per node SLURM's node number is not taken for a rank."""
    expected = Ranks(3, 8, 1, 2, "host", 29500, "torchrun")
    assert find_ranks(TORCH) == expected
    assert find_ranks({**TORCH, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}) == expected


def test_slurm_tasks():
    """One task per GPU: rank, local rank and the first host come from SLURM, ranks agree on a port."""
    ranks = find_ranks(SLURM)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (9, 12, 1, 4)
    assert (ranks.master_addr, ranks.source) == ("gpu03", "slurm")
    first = find_ranks({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first.master_port == ranks.master_port
    assert first.local_world_size == 8


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[001-004]", "n001"), ("n[01,03]-ib,m", "n01-ib"), ("n[7]", "n7")],
)
def test_first_host(nodes, first):
    """SLURM's node list notation is understood."""
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS is 8", "srun"]),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ["SLURM_NTASKS is 8", "srun"]),
        (
            {**TORCH, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "SLURM_NTASKS": "2"},
            ["SLURM_NTASKS is 2", "WORLD_SIZE"],
        ),
        ({**TORCH, "RANK": "8"}, ["RANK is 8", "WORLD_SIZE is 8"]),
        ({**TORCH, "RANK": "x"}, ["RANK is 'x'"]),
        ({**TORCH, "LOCAL_RANK": "2"}, ["LOCAL_RANK is 2"]),
        ({name: value for name, value in TORCH.items() if name != "MASTER_ADDR"}, ["MASTER_ADDR", "torchrun"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({**SLURM, "SLURM_PROCID": "12"}, ["SLURM_PROCID is 12", "12 tasks"]),
    ],
)
def test_contradictions_are_refused(env, words):
    """Variables that contradict each other are refused in a sentence that names them."""
    with pytest.raises(ValueError) as caught:
        find_ranks(env)
    for word in words:
        assert word in str(caught.value)
