"""What memory and cores this process may use. Read from cgroup, rlimits and affinity, never from MemTotal.

MemTotal is no limit: on virtual machines it starts low and grows as memory is used.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class HostLimits:
    """available_bytes: memory this process may still take, None where nothing limits it; source: what limits it.

    memlock_bytes: the limit on locked memory, None if unlimited. cores: cores this process may run on.
    """

    available_bytes: int | None
    source: str
    memlock_bytes: int | None
    cores: int


def read_host_limits(
    cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")
) -> HostLimits:
    """Read the limits of this process. The paths are arguments so that tests can give files of their own."""
    available, source = _cgroup_available(cgroup_root, self_cgroup)
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    address_space, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY and (available is None or address_space < available):
        available, source = address_space, "ulimit -v"
    return HostLimits(
        available_bytes=available,
        source=source,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        cores=len(os.sched_getaffinity(0)),
    )


def _cgroup_available(root: Path, self_cgroup: Path) -> tuple[int | None, str]:
    """Smallest (limit - use + reclaimable file cache) on the way from this process's group to the root."""
    best: tuple[int | None, str] = (None, "none set")
    for directory, limit_name, usage_name in _memory_groups(root, self_cgroup):
        limit = _read_int(directory / limit_name)
        if limit is None or limit >= _UNLIMITED:
            continue
        usage = _read_int(directory / usage_name) or 0
        free = limit - usage + _reclaimable(directory / "memory.stat")
        if best[0] is None or free < best[0]:
            best = (max(0, free), f"cgroup {directory / limit_name}")
    return best


def _memory_groups(root: Path, self_cgroup: Path) -> list[tuple[Path, str, str]]:
    groups: list[tuple[Path, str, str]] = []
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        directory = base / path.lstrip("/")
        while True:  # inside a container the path may not exist below the mount: its parents then do
            groups.append((directory, *names))
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return groups


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _reclaimable(stat: Path) -> int:
    """Clean file cache, which the kernel gives up before it kills."""
    try:
        for line in stat.read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def ranks_on_this_node() -> int:
    """Processes of this job on this machine, as torchrun or SLURM say it; 1 without either."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "").split("(")[0]
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def fair_cores(mine: Collection[int], everyone: Sequence[Collection[int]]) -> float:
    """Cores that one rank has if all ranks of its node work: each core shared by the ranks that may run on it.

    mine: numbers of the cores that this rank may use; everyone: the same of all ranks of the node, this one included.
    """
    return sum(1.0 / sum(core in others for others in everyone) for core in mine)
