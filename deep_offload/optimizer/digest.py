"""The state digest: one sha256 of parameters and optimizer state that no placement, storage or layout changes."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, order=True)
class DigestEntry:
    """One full, unpadded tensor: its parameter's global name, its kind, type, shape and the sha256 of its bytes."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def digest_entry(name: str, kind: str, tensor: torch.Tensor) -> DigestEntry:
    """Hash a tensor's elements in row-major order. kind: param, master, exp_avg or exp_avg_sq."""
    data = tensor.detach().cpu().contiguous()
    raw = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy())
    return DigestEntry(name, kind, str(data.dtype).removeprefix("torch."), tuple(data.shape), raw.hexdigest())


class EntryHasher:
    """Hashes tensors on a few threads (hashing releases the GIL) while the caller collects the next ones."""

    MAX_THREADS = 8
    MAX_BYTES = 4 << 30
    """Of copies that wait to be hashed, unless a single tensor is larger."""

    def __init__(self) -> None:
        self._threads = min(self.MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._threads)
        self._running: deque[tuple[Future[DigestEntry], int]] = deque()
        self._num_bytes = 0
        self._entries: list[DigestEntry] = []

    def add(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        """Take a tensor that nobody changes any more; blocks while enough others wait to be hashed."""
        while self._running and (
            len(self._running) >= self._threads or self._num_bytes + tensor.nbytes > self.MAX_BYTES
        ):
            self._take_first()
        self._running.append((self._pool.submit(digest_entry, name, kind, _on_host(tensor)), tensor.nbytes))
        self._num_bytes += tensor.nbytes

    def finish(self) -> list[DigestEntry]:
        """All entries so far; ends the threads."""
        while self._running:
            self._take_first()
        self._pool.shutdown()
        return self._entries

    def _take_first(self) -> None:
        future, num_bytes = self._running.popleft()
        self._entries.append(future.result())
        self._num_bytes -= num_bytes


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory. Torch hands pinned pages out again; fresh pageable ones cost ten times the copy."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def combine(entries: Iterable[DigestEntry], step: int) -> str:
    """The digest of a whole state, `sha256:<hex>`; entries in any order, equal ones (tied copies) counted once."""
    total = hashlib.sha256()
    for entry in sorted(set(entries)):
        shape = ",".join(map(str, entry.shape))
        total.update(f"{entry.name}|{entry.kind}|{entry.dtype}|{shape}|{entry.sha256}\n".encode())
    total.update(f"step|{step}\n".encode())
    return f"sha256:{total.hexdigest()}"
