"""A small process beside each rank that outlives it, and says so when the kernel killed the rank for want of memory.

A killed process writes nothing. The watcher (standard library only, a few MiB) remembers the rank's last resident size
and, when the rank ends without a word, looks into the control group's count of kills.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from megatron.training.host_memory import HostMemory, read_host_memory

_SECONDS = 0.5


class MemoryWatch:
    """Owns the watcher of this process. Call `close` on every way out that Python can take."""

    def __init__(self, rank: int, planned_bytes: int, folder: Path | None) -> None:
        """planned_bytes: of host memory, as the planner said; folder: gets the report, beside standard error."""
        script = "import sys; from megatron.training.memory_watch import watch; watch(*map(str, sys.argv[1:]))"
        where = "" if folder is None else str(folder)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", script, str(os.getpid()), str(rank), str(planned_bytes), where],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # signals of the terminal and of the launcher are not for it
        )

    def close(self) -> None:
        """End the watcher: this process ends by itself. At once, even if the watcher has not come to life yet."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def watch(pid: str, rank: str, planned_bytes: str, folder: str) -> None:
    """The watcher's life: look at a process until it is gone. A process that ends by itself ends its watcher first."""
    first = last = read_host_memory(pid)
    pipe = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([pipe], [], [], _SECONDS)
        if ready:
            break  # the other end is closed, and only death closes it
        now = read_host_memory(pid)
        if not now.resident:
            break  # gone, though a forked data worker still holds the pipe open
        last = now
    time.sleep(_SECONDS)  # the kernel counts after it has killed
    text = verdict(rank, first, last, _kills(), int(planned_bytes))
    print(text, file=sys.stderr, flush=True)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"killed_rank{rank}.txt").write_text(text + "\n")


def _kills() -> int:
    return read_host_memory().num_kills  # the watcher lives in the same control group


def verdict(rank: str, first: HostMemory, last: HostMemory, kills: int, planned_bytes: int) -> str:
    """Return the sentence about a rank that is gone without a word."""
    sizes = (
        f"its last resident size was {last.resident / 2**30:.3f} GiB (peak {last.peak / 2**30:.3f}), the plan was "
        f"{planned_bytes / 2**30:.3f} GiB of optimizer state"
    )
    limit = "no limit is set" if last.limit is None else f"the limit is {last.limit / 2**30:.3f} GiB for all"
    if kills > first.num_kills:
        return (
            f"rank {rank} was killed by the kernel because host memory ran out: {sizes}, {limit}; raise --mem, start "
            "fewer ranks on this host, or keep more state on the GPU (--offload-resident-fraction)"
        )
    return f"rank {rank} ended without a word (kill -9, or a crash in native code): {sizes}, {limit}"
