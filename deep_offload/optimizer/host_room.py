"""Host memory that a rank may still take."""

from __future__ import annotations

import psutil

from deep_offload.runtime.limits import read_host_limits


def available_host_bytes() -> int:
    """The least of what the machine has free and what this process's control groups and limits leave it."""
    free, allowed = int(psutil.virtual_memory().available), read_host_limits().available_bytes
    return free if allowed is None else min(free, allowed)
