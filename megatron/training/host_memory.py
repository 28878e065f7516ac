"""Host memory of this process and what limits it. Standard library only: the watcher imports it without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. resident: of a process now; peak: its highest; used: of everything under `limit`; limit: None if none.

    num_kills: processes that the kernel has killed in the control group for want of memory.
    """

    resident: int
    peak: int
    used: int
    limit: int | None
    num_kills: int


def read_host_memory(pid: int | str = "self", root: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Return what /proc and the process's control groups say; zeros for a process that is gone."""
    status = _fields(Path(f"/proc/{pid}/status"))
    resident, peak = (_kibibytes(status.get(name, "")) for name in ("VmRSS", "VmHWM"))
    used, limit, kills = resident, None, 0
    for folder, limit_name, used_name, events in _groups(pid, root):
        bound = _number(folder / limit_name)
        kills += int(_fields(folder / events, " ").get("oom_kill", "0").strip() or 0)
        if bound is not None and bound < _UNLIMITED and (limit is None or bound < limit):
            limit, used = bound, (_number(folder / used_name) or 0)
    return HostMemory(resident, peak, used, limit, kills)


def describe(memory: HostMemory) -> str:
    """Return `used/limit` in GiB; without a limit what this process uses."""
    if memory.limit is None:
        return f"{memory.resident / 2**30:.2f}"
    return f"{memory.used / 2**30:.2f}/{memory.limit / 2**30:.2f}"


def _groups(pid: int | str, root: Path) -> Iterator[tuple[Path, str, str, str]]:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "memory.events")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        else:
            continue
        folder = base / path.lstrip("/")
        while True:  # inside a container the path may not exist below the mount: its parents then do
            if folder.is_dir():
                yield (folder, *names)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _fields(path: Path, separator: str = ":") -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(separator) for line in lines)}


def _kibibytes(text: str) -> int:
    words = text.split()
    return int(words[0]) << 10 if words and words[0].isdigit() else 0
