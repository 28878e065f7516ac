"""Host memory for optimizer state: one mapping of huge pages, exact sizes, pinned in chunks."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.plan.storage import page_rounded

_MAP_NORESERVE = 0x4000  # or the kernel refuses more than MemTotal, which grows on virtual machines
_MADV_WIPEONFORK = 18

PIN_CHUNK_BYTES = 4 << 30
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array to place: elements and type."""

    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return page_rounded(self.numel * self.dtype.itemsize)


class HostArena:
    """Owns host memory for all arrays of one rank; `arrays` are views, valid until `close`.

    Pages are huge where the kernel allows it, and touched once, zeroed, by the threads that will use them. A forked
    process, as data workers are, finds zeros: its pages would be copied when the parent next writes them. With `pin`
    the pages are registered with CUDA in chunks that no array crosses; if that fails the arena stays pageable, with
    one warning.
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        *,
        pin: bool,
        num_threads: int,
        warn: Callable[[str], None],
        log: Callable[[str], None] = print,
    ) -> None:
        """warn: takes the failure to pin; log: a line now and then where reserving takes long."""
        self._specs = tuple(specs)
        self.num_bytes = sum(s.num_bytes for s in specs)
        self.is_pinned = pin and self.num_bytes > 0
        self._registered: list[int] = []
        self.arrays: list[torch.Tensor] = []
        if self.num_bytes == 0:
            self.arrays = [torch.empty(0, dtype=s.dtype) for s in specs]
            return
        base = torch.frombuffer(_private_mapping(self.num_bytes), dtype=torch.uint8)
        progress = _Progress(self.num_bytes, log)
        for start, num_bytes in _chunks([s.num_bytes for s in self._specs], self.num_bytes):
            address = base.data_ptr() + start
            cpu_kernels.extension().first_touch(address, num_bytes, num_threads)
            if self.is_pinned:
                self.is_pinned = self._pin(address, num_bytes, warn)
            progress.add(num_bytes)
        offset = 0
        for spec in self._specs:
            raw = base[offset : offset + spec.numel * spec.dtype.itemsize]
            self.arrays.append(raw.view(spec.dtype))
            offset += spec.num_bytes

    def _pin(self, address: int, num_bytes: int, warn: Callable[[str], None]) -> bool:
        status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if status == 0:
            self._registered.append(address)
            return True
        _forget_cuda_error()
        self._unpin()
        warn(
            f"pinning {self.num_bytes / 2**30:.1f} GiB of host memory failed (CUDA error {status}): copies use "
            "pageable memory and reach about a tenth of the link; raise the memory limit or lower the state"
        )
        return False

    def _unpin(self) -> None:
        for address in self._registered:
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                _forget_cuda_error()
        self._registered.clear()

    def close(self) -> None:
        """Unpin and drop the arrays: the memory is free once nobody has a view of it. No copy may be in flight."""
        self._unpin()
        self.arrays.clear()


def _forget_cuda_error() -> None:
    """Take back the error that a failed runtime call leaves behind: the next kernel of any kind would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


class _Progress:
    """Says how far it is, every SECONDS_BETWEEN_LINES."""

    def __init__(self, num_bytes: int, log: Callable[[str], None]) -> None:
        self._num_bytes, self._log = num_bytes, log
        self._done = 0
        self._start = self._last = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many further bytes are there."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES and self._done < self._num_bytes:
            self._last = now
            self._log(
                f"reserving host memory: {self._done / 2**30:.1f} of {self._num_bytes / 2**30:.1f} GiB after "
                f"{now - self._start:.0f} s"
            )


def _private_mapping(num_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise ValueError(
            f"{num_bytes / 2**30:.2f} GiB of host memory for optimizer state could not be mapped ({error}): "
            "use more GPUs or raise --offload-resident-fraction"
        ) from error
    try:
        mapping.madvise(_MADV_WIPEONFORK)
    except OSError:  # Linux before 4.14, gVisor
        mapping.madvise(mmap.MADV_DONTFORK)
    # Nine times as quick to touch as a shared mapping of small pages (4.3 and 39 GiB/s on a machine with 16 cores).
    with contextlib.suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _chunks(sizes: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Cut [0, total) between arrays into ranges (start, bytes) of PIN_CHUNK_BYTES or a little more."""
    borders = [0]
    offset = 0
    for size in sizes:
        if offset - borders[-1] >= PIN_CHUNK_BYTES:
            borders.append(offset)
        offset += size
    borders.append(total)
    return [(a, b - a) for a, b in zip(borders, borders[1:], strict=False)]
