"""Our checkpoints without any process group: written and read one tensor of one layer at a time.

The tensors of all layers share one key, with an axis of layers in front, as megatron-core names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing_format import BoxWriter, CheckpointReader
from megatron.training.checkpointing_layout import CHECKSUMS, COMMON, CONFIG, METADATA
from megatron.training.checkpointing_safety import load_checked, read_checksums, verify_files
from megatron.training.checkpointing_save import NUM_FILES, write_common
from megatron.training.conversion.ahead import one_ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One tensor to be written: layer `layer` of `num_layers` under `key`, or the whole of it (layer None)."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    layer: int | None = None
    num_layers: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    folder: Path, chunks: Sequence[Chunk], common: dict[str, Any], written: Callable[[int], None]
) -> None:
    """Write a checkpoint into an empty folder, which looks complete only when this returns.

    common: what is no tensor; written: called with the bytes of each tensor when it is in the file.
    """
    with BoxWriter(folder, "__0_0.distcp") as writer:
        for chunk, tensor in zip(chunks, one_ahead(chunk.make for chunk in chunks)):
            assert tensor.dtype == chunk.dtype and tuple(tensor.shape) == chunk.shape, chunk
            if chunk.layer is None:
                writer.add_tensor(chunk.key, chunk.shape, (0,) * len(chunk.shape), chunk.shape, tensor)
            else:
                offset = (chunk.layer, *(0 for _ in chunk.shape))
                writer.add_tensor(chunk.key, (chunk.num_layers, *chunk.shape), offset, (1, *chunk.shape), tensor)
            written(chunk.num_bytes)
        file = writer.finish()
    write_common(folder, common, [file])


class LayerReader:
    """The tensors of one checkpoint folder (iter_NNNNNNN or release), whatever layout wrote it."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, one sentence, for a folder that is no complete checkpoint of this format."""
        missing = [name for name in (CONFIG, METADATA, COMMON) if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder} lacks {', '.join(missing)}: give a torch_dist checkpoint that was saved to the end"
            )
        self.folder = folder
        self._reader = CheckpointReader(folder)
        self._tensors = self._reader.tensors()

    def verify(self) -> None:
        """Check the files of the tensors, the index and the rest against the checksums, if the checkpoint has them.

        Raises ValueError, one sentence, naming a damaged file.
        """
        sums = read_checksums(self.folder)
        if sums is None:
            return
        names = sorted({*self._reader.files(), COMMON, METADATA})
        unknown = [name for name in names if name not in sums]
        if unknown:
            raise ValueError(f"{self.folder / CHECKSUMS} has no line for {unknown[0]}: give another checkpoint")
        verify_files(self.folder, names, sums, NUM_FILES)

    def keys(self) -> list[str]:
        """Return the names of all tensors, optimizer state included."""
        return sorted(self._tensors)

    def _find(self, key: str, layer: int | None) -> tuple[str, bool]:
        """Return the stored key and whether its first axis counts layers."""
        if key in self._tensors:
            return key, layer is not None
        alone = key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
        if layer is not None and alone in self._tensors:
            return alone, False
        raise ValueError(f"{self.folder} has no tensor {key}: it is the checkpoint of another kind of model")

    def info(self, key: str, layer: int | None = None) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor, of one layer where `layer` is given."""
        stored, has_layers = self._find(key, layer)
        entry = self._tensors[stored]
        return tuple(entry.size)[int(has_layers) :], entry.properties.dtype

    def read(self, key: str, layer: int | None = None, num_rows: int | None = None) -> torch.Tensor:
        """Return a tensor; num_rows: only that many first rows, which must exist.

        Raises ValueError, one sentence, unless the index names each of its elements once.
        """
        stored, has_layers = self._find(key, layer)
        shape, dtype = self.info(key, layer)
        if num_rows is not None:
            shape = (num_rows, *shape[1:])
        out = torch.empty(shape, dtype=dtype)
        target = out.unsqueeze(0) if has_layers else out
        offset = (layer or 0, *(0 for _ in shape)) if has_layers else (0,) * len(shape)
        filled = 0
        for where, values in self._reader.read(stored, offset, tuple(target.shape)):
            target[where].copy_(values)
            filled += values.numel()
        if filled != out.numel():
            of_layer = "" if layer is None else f" of layer {layer}"
            raise ValueError(
                f"{self.folder / METADATA} names {filled} of {out.numel()} elements of {key}{of_layer}: it has gaps or "
                "boxes that overlap, give another checkpoint"
            )
        return out

    def common(self) -> dict[str, Any]:
        """Return what the checkpoint holds beside tensors."""
        return load_checked(self.folder / COMMON, str(self.folder / COMMON))
