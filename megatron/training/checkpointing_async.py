"""Saving beside training: a thread writes this rank's files while forward and backward go on.

The thread reads either a copy, taken where the host has room for one, or the state itself; then the next update waits
until the thread has read it all. Either way no later step is in the checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_offload.optimizer.host_room import available_host_bytes
from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import WrittenFile
from megatron.training.checkpointing_save import SaveItem, SaveResult, complete, together, write_own
from megatron.training.votes import highest


@dataclass(frozen=True, slots=True)
class Retention:
    """Which older checkpoints stay."""

    keep_last: int | None
    retain_interval: int | None


class AsyncSave:
    """One checkpoint that is being written. `poll` and the constructor are collective over all ranks."""

    def __init__(
        self,
        root: Path,
        iteration: int,
        items: Sequence[SaveItem],
        common: dict[str, Any],
        retention: Retention,
        device: torch.device,
        copy: bool,
    ) -> None:
        """items: of this rank; copy: take a copy of them now instead of letting the next update wait."""
        started = time.monotonic()
        self.iteration = iteration
        self.is_copied = copy
        self._root, self._common, self._retention, self._device = root, common, retention, device
        self._written: list[WrittenFile] = []
        self._fault: Exception | None = None
        _, self._error = together(lambda: layout.begin(root, iteration) if dist.get_rank() == 0 else None)
        if copy:
            items = [_copied(item) for item in items]
        ready = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._write, args=(items, ready), name="checkpoint-writer", daemon=True)
        if self._error is None:
            self._thread.start()
        self.pause = time.monotonic() - started
        """Seconds that training has stood still for this save so far."""

    def wait_for_reader(self) -> None:
        """Before state changes: wait until the thread has read it, unless it reads a copy."""
        if self.is_copied or not self._thread.is_alive():
            return
        started = time.monotonic()
        self._thread.join()
        self.pause += time.monotonic() - started

    def poll(self, block: bool) -> SaveResult | None:
        """Finish the checkpoint if all ranks have written, after waiting for them with `block`; else None."""
        started = time.monotonic()
        if block and self._thread.ident is not None:
            self._thread.join()
        if highest(int(self._thread.is_alive()), self._device):
            self.pause += time.monotonic() - started
            return None
        written: list[list[WrittenFile] | None] = []
        error = self._error
        if error is None:
            written, error = together(self._result)
        files = [file for own in written for file in own or ()]
        if error is None:
            keep = self._retention
            error = complete(
                self._root, self.iteration, files, lambda: self._common, keep.keep_last, keep.retain_interval
            )
        if error is not None and dist.get_rank() == 0:
            layout.discard(self._root, self.iteration)
        self.pause += time.monotonic() - started
        num_bytes = sum(file.num_bytes for file in files)
        return SaveResult(self.iteration, num_bytes, self.pause, error)

    def _result(self) -> list[WrittenFile]:
        if self._fault is not None:
            raise self._fault
        return self._written

    def _write(self, items: Sequence[SaveItem], ready: Any) -> None:
        try:
            folder = layout.unfinished_folder(self._root, self.iteration)
            if ready is None:
                self._written = write_own(folder, items)
                return
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream()
            stream.wait_event(ready)  # behind what made the state final, beside what comes after
            with torch.cuda.stream(stream):
                self._written = write_own(folder, items)
        except Exception as fault:  # noqa: BLE001 - it belongs to `poll`, on the main thread
            self._fault = fault


def _copied(item: SaveItem) -> SaveItem:
    value = item.read()
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", copy=True)
    return replace(item, read=lambda: value)


def has_room_for_copy(num_bytes: int, ranks_on_host: int) -> bool:
    """Whether the host can hold a copy of `num_bytes` for each of its ranks and keep a quarter of what is free."""
    return num_bytes * ranks_on_host < 0.75 * available_host_bytes()
