"""What this process may use, read from files that tests write."""

from pathlib import Path

import pytest

from deep_offload.model.this_machine import cpu_update_threads
from deep_offload.runtime.limits import ranks_on_this_node, read_host_limits

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits(tmp_path: Path, membership: str):
    write(tmp_path / "self", membership)
    return read_host_limits(tmp_path / "cgroup", tmp_path / "self")


def test_cgroup_v2_smallest_limit_on_the_way_up(tmp_path):
    """The tightest of the nested groups counts, less its use, with reclaimable file cache given back."""
    root = tmp_path / "cgroup"
    write(root / "job" / "memory.max", str(10 * GIB))
    write(root / "job" / "memory.current", str(4 * GIB))
    write(root / "job" / "memory.stat", f"anon 5\ninactive_file {1 * GIB}\n")
    write(root / "job" / "step" / "memory.max", "max\n")
    write(root / "job" / "step" / "memory.current", str(3 * GIB))
    found = limits(tmp_path, "0::/job/step\n")
    assert found.available_bytes == 7 * GIB
    assert "job/memory.max" in found.source


def test_cgroup_v1(tmp_path):
    """The memory controller of version 1; its 'unlimited' is a huge number."""
    root = tmp_path / "cgroup" / "memory"
    write(root / "memory.limit_in_bytes", str(9223372036854771712))
    write(root / "a" / "memory.limit_in_bytes", str(8 * GIB))
    write(root / "a" / "memory.usage_in_bytes", str(2 * GIB))
    found = limits(tmp_path, "3:cpu:/a\n2:memory:/a\n")
    assert found.available_bytes == 6 * GIB


def test_container_whose_path_is_not_mounted(tmp_path):
    """Inside a container the group's path may not exist: the mount's own files are read."""
    write(tmp_path / "cgroup" / "memory.max", str(2 * GIB))
    assert limits(tmp_path, "0::/docker/abc\n").available_bytes == 2 * GIB


def test_no_limit_is_not_memtotal(tmp_path):
    """Without any limit nothing is assumed: MemTotal may grow."""
    (tmp_path / "cgroup").mkdir()
    found = limits(tmp_path, "0::/\n")
    assert found.available_bytes is None
    assert found.source == "none set"


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 4), ({"LOCAL_WORLD_SIZE": "x"}, 1)],
)
def test_ranks_of_this_machine(monkeypatch, environment, ranks):
    """torchrun says it, else SLURM, else one."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_this_node() == ranks


def test_threads_are_the_ranks_share_of_the_cores():
    """One core is left to the thread that launches kernels; never fewer than one thread, never OMP_NUM_THREADS."""
    assert cpu_update_threads(16, 1, True) == 15
    assert cpu_update_threads(16, 2, True) == 7
    assert cpu_update_threads(2, 8, True) == 1
    assert cpu_update_threads(2, 1, False) == 2
