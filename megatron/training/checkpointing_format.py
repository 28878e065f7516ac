"""The torch_dist format of megatron-core: files of boxes of tensors, and the index that says where each box is.

megatron-core's own loader reads what is written here, and `CheckpointReader` reads what megatron-core writes. Tensors
are read and written one box at a time, in any order, by any number of ranks that know nothing of each other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deep_offload.optimizer.checkpoint_boxes import Shape, inside, overlap
from megatron.training.checkpointing_layout import METADATA
from megatron.training.checkpointing_safety import FilePart, load_checked, load_index, with_path

CONFIG_TEXT = json.dumps(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
)

_SMALL_BYTES = 1 << 20
"""Writes below are hashed at once: handing them over costs more."""

_SYNC_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """One box of a tensor (or one object, whose shapes are None) in a file: bytes [start, start + length)."""

    key: str
    start: int
    length: int
    dtype: torch.dtype | None = None
    global_shape: Shape | None = None
    offset: Shape | None = None
    shape: Shape | None = None


@dataclass(slots=True)
class WrittenFile:
    """A file that is complete on disk: its name in the checkpoint's folder, bytes, SHA-256 and what it holds."""

    name: str
    num_bytes: int = 0
    sha256: str = ""
    items: list[WrittenItem] = field(default_factory=list)


class BoxWriter:
    """Writes one file of boxes and objects, front to back. Nothing is kept in memory but the list of items.

    Use it as a context manager: it closes the file, and only `finish` makes it durable.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._written = WrittenFile(name)
        self._stream = _HashedFile(folder / name)

    @property
    def stream(self) -> _HashedFile:
        """The file itself, for what is neither box nor object."""
        return self._stream

    def __enter__(self) -> BoxWriter:
        return self

    def __exit__(self, *unused: object) -> None:
        self._stream.close()

    def add_tensor(self, key: str, global_shape: Shape, offset: Shape, shape: Shape, values: torch.Tensor) -> None:
        """Append the box at `offset` of tensor `key`; values: its elements in row-major order, on any device."""
        data = values.detach().to("cpu").contiguous().view(shape)
        if data.untyped_storage().nbytes() != data.numel() * data.element_size():
            data = _own_storage(data)
        start = self._stream.position
        self._stream.save(data)
        length = self._stream.position - start
        self._written.items.append(WrittenItem(key, start, length, data.dtype, global_shape, offset, shape))

    def add_object(self, key: str, value: Any) -> None:
        """Append an object of plain Python and tensors; key: with its shard, as megatron-core's `unique_key`."""
        start = self._stream.position
        self._stream.save([value])
        self._written.items.append(WrittenItem(key, start, self._stream.position - start))

    def finish(self) -> WrittenFile:
        """Wait until the disk has the file; returns what it holds."""
        self._written.num_bytes, self._written.sha256 = self._stream.finish()
        return self._written


class _HashedFile:
    """A file for `torch.save` that hashes what goes through it, while it writes, and lets the disk begin early."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-hash")
        self._synced: Future[None] | None = None
        self._unsynced = 0
        self.position = 0

    def save(self, value: Any) -> None:
        """`torch.save` into the file. Raises OSError as the disk told it."""
        try:
            torch.save(value, self)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch ends its archive all the same, which hides a full disk
                raise error.__context__ from None
            raise

    def write(self, data: Any) -> int:
        """Append bytes; returns how many. `data` is not touched afterwards."""
        view = memoryview(data).cast("B")
        if len(view) < _SMALL_BYTES:
            self._digest.update(view)
            self._file.write(view)
        else:
            hashed = self._helpers.submit(self._digest.update, view)
            try:
                self._file.write(view)
            finally:
                hashed.result()
        self.position += len(view)
        self._unsynced += len(view)
        if self._unsynced >= _SYNC_BYTES and (self._synced is None or self._synced.done()):
            self._start_sync()
        return len(view)

    def _start_sync(self) -> None:
        """Without it the system begins to write when a tenth of its memory is full, and `finish` waits for the rest."""
        self._raise_sync_error()
        self._file.flush()
        self._unsynced = 0
        self._synced = self._helpers.submit(os.fdatasync, self._file.fileno())

    def _raise_sync_error(self) -> None:
        """The system tells an error of the disk only once."""
        if self._synced is not None:
            self._synced.result()

    def flush(self) -> None:
        """torch.save calls it; `finish` is what counts."""

    def finish(self) -> tuple[int, str]:
        self._raise_sync_error()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return self.position, self._digest.hexdigest()

    def close(self) -> None:
        self._helpers.shutdown()  # a sync uses the descriptor
        # After an error the buffer cannot be flushed either: the first error is the one to report.
        try:
            self._file.close()
        except OSError:
            pass


def _own_storage(data: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is no larger than itself, or torch.save would write all of it."""
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(raw, dtype=data.dtype).view(data.shape)


def build_index(files: Iterable[WrittenFile]) -> bytes:
    """Return the `.metadata` of a checkpoint made of `files`."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for item in file.items:
            place = _StorageInfo(file.name, item.start, item.length)
            if item.shape is None or item.offset is None or item.global_shape is None or item.dtype is None:
                entries[item.key] = BytesStorageMetadata()
                storage[MetadataIndex(item.key)] = place
                continue
            tensor = entries.setdefault(
                item.key,
                TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.global_shape), chunks=[]),
            )
            storage[MetadataIndex(item.key, torch.Size(item.offset), len(tensor.chunks))] = place
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape)))
    return pickle.dumps(Metadata(state_dict_metadata=entries, storage_data=storage))


def missing_parts(files: Iterable[WrittenFile]) -> list[str]:
    """Return the tensors whose boxes do not fill them, with the missing elements: none in a complete checkpoint."""
    have: dict[str, int] = {}
    want: dict[str, int] = {}
    for file in files:
        for item in file.items:
            if item.shape is not None and item.global_shape is not None:
                have[item.key] = have.get(item.key, 0) + math.prod(item.shape)
                want[item.key] = math.prod(item.global_shape)
    return [f"{key} ({want[key] - have[key]} elements)" for key in want if have[key] != want[key]]


class CheckpointReader:
    """Reads boxes of a torch_dist checkpoint's tensors, whatever boxes they were written in."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, one sentence, for an index that is torn, dangerous, or leads out of the folder."""
        self.folder = folder
        index = load_index(folder / METADATA)
        self._entries: dict[str, Any] = index.state_dict_metadata
        self._places: dict[tuple[str, Shape | None], Any] = {}
        for key, place in (index.storage_data or {}).items():
            name = str(place.relative_path)
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ValueError(f"{folder / METADATA} names the file {name!r} outside of its folder: it is not opened")
            self._places[(key.fqn, None if key.offset is None else tuple(key.offset))] = place
        self._last: tuple[tuple[str, Shape], torch.Tensor] | None = None

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the tensors by key: `size`, `properties.dtype` and `chunks`."""
        return {key: entry for key, entry in self._entries.items() if isinstance(entry, TensorStorageMetadata)}

    def objects(self) -> list[str]:
        """Return the keys of objects."""
        return [key for key, entry in self._entries.items() if isinstance(entry, BytesStorageMetadata)]

    def files(self) -> dict[str, int]:
        """Return each file's name with the least number of bytes that it must have."""
        sizes: dict[str, int] = {}
        for place in self._places.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        return sizes

    def shape(self, key: str) -> Shape | None:
        """Return the shape of a tensor, None if there is none."""
        entry = self._entries.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def read(self, key: str, offset: Shape, shape: Shape) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Yield (place in the box, values) for what the file has of box `offset`, `shape` of tensor `key`.

        Memory: one written box at a time. Parts beyond the tensor's end are left out.
        """
        for chunk in self._entries[key].chunks:
            at, size = tuple(chunk.offsets), tuple(chunk.sizes)
            where = overlap(offset, shape, at, size)
            if where is not None:
                yield inside(where, offset), self._chunk(key, at)[inside(where, at)]

    def _chunk(self, key: str, at: Shape) -> torch.Tensor:
        if self._last is not None and self._last[0] == (key, at):
            return self._last[1]
        self._last = None
        place = self._places[(key, at)]
        path = self.folder / place.relative_path
        with open(path, "rb") as file:
            view = FilePart(file, place.offset, place.length)
            try:
                tensor = torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # noqa: BLE001 - a torn file raises nearly anything
                if view.fault is not None:
                    raise with_path(view.fault, path) from None
                raise ValueError(
                    f"{path} is damaged where {key} stands ({type(error).__name__}): load another with --ckpt-step"
                ) from None
        self._last = ((key, at), tensor)
        return tensor

    def read_object(self, key: str) -> Any:
        """Return an object; its pickle passes the allow-list first."""
        place = self._places[(key, None)]
        path = self.folder / place.relative_path
        with open(path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        value = load_checked(data, f"{path} ({key})")
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def flat_values(reader: CheckpointReader, key: str, offset: Shape, shape: Shape, fill: torch.Tensor) -> torch.Tensor:
    """Return the elements of a box, flat, in the file's own type; beyond the tensor's end they come from `fill`.

    Raises ValueError, one sentence, unless the index names each element up to there once.
    """
    end = reader.shape(key)
    assert end is not None, "shapes are checked before values are read"
    within = overlap(offset, shape, (0,) * len(shape), end)
    wanted = 0 if within is None else math.prod(part.stop - part.start for part in within)
    out: torch.Tensor | None = None
    filled = 0
    for where, values in reader.read(key, offset, shape):
        if out is None:
            out = torch.empty(shape, dtype=values.dtype)
            if math.prod(shape) != values.numel():
                out.copy_(fill.view(shape))
        out[where].copy_(values)
        filled += values.numel()
    if filled != wanted:
        raise ValueError(
            f"{reader.folder / METADATA} names {filled} of {wanted} elements of {key} in box {offset}, {shape}: it "
            "has gaps or boxes that overlap, load another checkpoint with --ckpt-step"
        )
    return fill.reshape(-1) if out is None else out.reshape(-1)


def check_shapes(reader: CheckpointReader, wanted: Sequence[tuple[str, Shape, bool]]) -> None:
    """Raise ValueError unless the checkpoint has each tensor (key, shape, whether its first axis may differ)."""
    missing = sorted({key for key, _, _ in wanted if reader.shape(key) is None})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{reader.folder} has no {', '.join(missing[:3])}{more}: load it with the model it was saved with, or with "
            f"--finetune or --no-load-optim if optimizer state is missing"
        )
    for key, shape, may_differ in wanted:
        found = reader.shape(key)
        assert found is not None
        same = len(found) == len(shape) and (found[1:] == shape[1:] if may_differ else found == shape)
        if not same:
            raise ValueError(
                f"{reader.folder} holds {key} of shape {found}, this model's is {shape}: give the model's shape as it "
                "was saved, or --use-checkpoint-args"
            )
