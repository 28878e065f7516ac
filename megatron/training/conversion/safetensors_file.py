"""Writing safetensors one tensor at a time: the library's own writer wants a whole file in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.training.conversion.ahead import one_ahead

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def split_into_files(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Return the entries in order, cut where a file would grow beyond `max_bytes`; each file has at least one."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.num_bytes
    return files


def file_names(count: int) -> list[str]:
    """Return HuggingFace's names of `count` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_file(path: Path, entries: Sequence[Entry], read: Callable[[str], torch.Tensor]) -> None:
    """Write one file; read(name) is called once for each entry, in order, and must return its dtype and shape.

    It is called in another thread, while the tensor before is being written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry, tensor in zip(entries, one_ahead(partial(read, entry.name) for entry in entries)):
            assert tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape, entry
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Write model.safetensors.index.json for several files."""
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    named = {entry.name: file for file, entries in files.items() for entry in entries}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
