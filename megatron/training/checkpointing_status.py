"""What a script reads after a run (SAVE/status), and what a save will cost, said before the first step."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Literal

import torch

from megatron.training.checkpointing_layout import replace_file
from megatron.training.host_memory import read_host_memory

STATUS = "status"
Outcome = Literal["running", "finished", "resumable", "failed"]

TORCHRUN_SECONDS = 30.0
"""After it passed a signal on, torchrun kills the ranks."""

_PROBE_BYTES = 64 << 20


def write_status(root: Path, outcome: Outcome, cause: str, iteration: int, code: int | None = None) -> None:
    """Write SAVE/status, a line of JSON. Launchers read it, because torchrun turns every exit code but 0 into 1.

    code: what the program ends with; None while it runs.
    """
    values: dict[str, object] = {"status": outcome, "cause": cause, "iteration": iteration}
    if code is not None:
        values["code"] = code
    replace_file(root / STATUS, (json.dumps(values) + "\n").encode())


def read_status(root: Path) -> dict[str, object] | None:
    """Return what `write_status` wrote, None if there is none."""
    try:
        return dict(json.loads((root / STATUS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def memory_figures() -> str:
    """Return what this process has allocated on its GPU, its host memory now and its peak, in words."""
    memory = read_host_memory()
    words = f"host {memory.resident / 2**30:.3f} GiB (peak {memory.peak / 2**30:.3f})"
    if torch.cuda.is_initialized():
        words = f"GPU {torch.cuda.memory_allocated() / 2**30:.3f} GiB, {words}"
    return words


def disk_bytes_per_second(root: Path, num_bytes: int) -> float:
    """Measure how fast one rank writes to `root`, with a file of at most `num_bytes` that is removed again."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".probe_{os.getpid()}"
    piece = os.urandom(1 << 20)  # a disk that compresses must not look faster than it is
    count = max(min(num_bytes, _PROBE_BYTES) >> 20, 1)
    try:
        started = time.monotonic()
        with open(path, "wb", buffering=0) as file:
            for _ in range(count):
                file.write(piece)
            os.fsync(file.fileno())
        return count * len(piece) / max(time.monotonic() - started, 1e-6)
    finally:
        path.unlink(missing_ok=True)


def cost_lines(
    root: Path, num_bytes: int, bytes_per_second: float, keep_last: int | None, has_signal_handler: bool
) -> list[str]:
    """Return lines on the seconds and the room that saves take; warnings where they do not fit.

    num_bytes: of one checkpoint.
    """
    seconds = num_bytes / bytes_per_second
    lines = [
        f"> a checkpoint is about {num_bytes / 2**30:.3f} GiB: about {seconds:.1f} s at the "
        f"{bytes_per_second / 1e9:.2f} GB/s that one rank just wrote to {root}"
    ]
    if has_signal_handler and seconds > TORCHRUN_SECONDS:
        lines.append(
            f"WARNING: torchrun kills all ranks {TORCHRUN_SECONDS:.0f} s after a signal and a save takes about "
            f"{seconds:.0f} s: use --exit-duration-in-mins, or sbatch --signal=USR1@"
            f"{int(seconds * 2) // 60 * 60 + 120} with srun and --exit-signal SIGUSR1"
        )
    copies = (keep_last or 1) + 1
    free = shutil.disk_usage(root).free
    if free < copies * num_bytes:
        lines.append(
            f"WARNING: {root} has {free / 2**30:.1f} GiB free, and {copies} checkpoints "
            f"{'(--keep-last and the one being written) ' if keep_last else ''}take "
            f"{copies * num_bytes / 2**30:.1f} GiB: free some or lower --keep-last"
        )
    return lines
