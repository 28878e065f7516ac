"""Who this process is: rank and world size from torchrun, SLURM, or a single process. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_TORCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all processes of the job.

    `local_*` count on this host. `source` says which variables decided.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: Literal["torchrun", "slurm", "single"]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the rank that prints the log line."""
        return self.rank == self.world_size - 1


def find_ranks(env: Mapping[str, str]) -> Ranks:
    """Return this process's ranks from environment variables: torch's first, then SLURM's, else a single process.

    Raises ValueError, one sentence, where variables are missing, no numbers, or contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        ranks = _torch_ranks(env)
    elif _is_slurm_task(env):
        ranks = _slurm_ranks(env)
    else:
        port = _number(env, "MASTER_PORT", 0)
        ranks = Ranks(0, 1, 0, 1, "127.0.0.1", port, "single")
    _check_against_slurm(env, ranks)
    return ranks


def _torch_ranks(env: Mapping[str, str]) -> Ranks:
    world_size = _number(env, "WORLD_SIZE")
    rank = _number(env, "RANK")
    local_rank = _number(env, "LOCAL_RANK", rank if world_size == 1 or "LOCAL_WORLD_SIZE" not in env else None)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", max(local_rank + 1, 1))
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0 to WORLD_SIZE - 1")
    if not 0 <= local_rank < max(local_world_size, 1) or local_world_size > world_size:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE {local_world_size} and WORLD_SIZE {world_size}, which "
            "contradict each other: let torchrun set them"
        )
    if world_size > 1:
        missing = [name for name in _TORCH_NAMES if name not in env]
        if missing:
            raise ValueError(f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} is not set: start with torchrun")
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return Ranks(rank, world_size, local_rank, local_world_size, address, _number(env, "MASTER_PORT", 0), "torchrun")


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    # The batch script itself also has SLURM_PROCID=0; only tasks that srun started have a numbered step.
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and "SLURM_PROCID" in env


def _slurm_ranks(env: Mapping[str, str]) -> Ranks:
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID", 0)
    if not 0 <= rank < world_size:
        raise ValueError(f"SLURM_PROCID is {rank} and SLURM started {world_size} tasks: the variables are mixed up")
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(world_size)))
    local_world_size = _tasks_on_node(tasks_per_node, _number(env, "SLURM_NODEID", 0))
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", env.get("SLURM_NODELIST", "127.0.0.1")))
    address = env.get("MASTER_ADDR", first_host(nodes))
    # One port per job and step, so that jobs which share a node do not meet.
    job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
    port = _number(env, "MASTER_PORT", 20000 + (job * 7 + step) % 20000)
    return Ranks(rank, world_size, local_rank, max(local_world_size, local_rank + 1), address, port, "slurm")


def _check_against_slurm(env: Mapping[str, str], ranks: Ranks) -> None:
    if ranks.source == "torchrun" and _is_slurm_task(env) and "GROUP_WORLD_SIZE" in env:
        launchers, tasks = _number(env, "GROUP_WORLD_SIZE"), _number(env, "SLURM_STEP_NUM_TASKS", 1)
        if launchers < tasks:
            raise ValueError(
                f"SLURM started {tasks} tasks, but this torchrun counts {launchers} (--nnodes): each would train "
                "alone, so give torchrun one task per node and --nnodes of all, or start python with srun alone"
            )
    num_tasks = _number(env, "SLURM_NTASKS", 1)
    if ranks.source == "slurm" or num_tasks <= ranks.world_size:
        return
    raise ValueError(
        f"SLURM_NTASKS is {num_tasks}, but this process belongs to a job of {ranks.world_size} "
        f"({'WORLD_SIZE' if ranks.source == 'torchrun' else 'no srun and no torchrun'}): start with srun, or with "
        "torchrun and one task per node, or unset SLURM_NTASKS"
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set though other variables of a distributed job are: start with torchrun")
        return default
    if not text.strip().isdigit():
        raise ValueError(f"{name} is {text!r}, it must be a whole number")
    return int(text)


def _tasks_on_node(text: str, node: int) -> int:
    """Return the tasks on node number `node` from SLURM's notation, such as `8(x2),4`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return 1
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list, such as `node[003-007,9],gpu1` (node003)."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if match is None:
        return nodes
    stem, numbers, tail = match[1], match[2], match[3]
    if numbers is None:
        return stem + tail
    return stem + re.split(r"[-,]", numbers)[0] + tail
