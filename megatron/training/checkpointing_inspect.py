"""What a checkpoint holds, read in pieces: no GPU, no process group, a few hundred MiB of memory at most."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deep_offload.optimizer.checkpoint import CHECKPOINT_KEYS
from deep_offload.optimizer.checkpoint_boxes import Area, Shape
from deep_offload.optimizer.digest import DigestEntry, combine
from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import CheckpointReader
from megatron.training.checkpointing_load import read_common
from megatron.training.checkpointing_safety import check_pickle, read_checksums, verify_file
from megatron.training.checkpointing_save import OUR_KEY

_STACKED = re.compile(r"(^|\.)layers\.(?!\d)")
_STATE = re.compile(r"optimizer\.state\.(param|exp_avg|exp_avg_sq)\.(.+)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# megatron-core saves the norms of its local layers under the names that they have in fused ones.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_KINDS = {key: name for name, key in CHECKPOINT_KEYS.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one parameter: its name in the whole model, its kind, and the box of the checkpoint's tensor."""

    name: str
    kind: str
    key: str
    dtype: torch.dtype
    offset: Shape
    box: Shape
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """One checkpoint, opened for looking. Raises ValueError, one sentence, for a damaged or dangerous one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.common = read_common(folder)
        self.reader = CheckpointReader(folder)
        args = self.common.get("args")
        self.args: dict[str, Any] = dict(vars(args)) if hasattr(args, "__dict__") else {}
        self.ours: dict[str, Any] = self.common.get(OUR_KEY, {})

    @property
    def step(self) -> int | None:
        """Updates of the optimizer; None without its state."""
        groups = self.common.get("optimizer", {}).get("optimizer", {}).get("param_groups", [])
        steps = [int(g["step"]) for g in groups if g.get("step") is not None]
        return max(steps) if steps else None

    def tensors(self, vocab_size: int | None = None) -> Iterator[Tensor]:
        """Yield parameters and their states, layers apart. vocab_size: leave out the vocabulary's padding beyond it."""
        for key, entry in self.reader.tensors().items():
            state = _STATE.fullmatch(key)
            name, kind = (state[2], _KINDS[state[1]]) if state else (key, "param")
            if key.startswith("optimizer.") and not state:
                continue
            size = tuple(entry.size)
            rows = min(vocab_size, size[0]) if vocab_size is not None and name in _VOCABULARY else None
            if rows is not None:
                size = (rows, *size[1:])
            name = self._name_in_model(name)
            if not _STACKED.search(name):
                yield Tensor(name, kind, key, entry.properties.dtype, (0,) * len(size), size, size)
                continue
            for layer in range(size[0]):
                full = _STACKED.sub(lambda m, layer=layer: f"{m[1]}layers.{layer}.", name, count=1)
                at = (layer, *(0,) * (len(size) - 1))
                yield Tensor(full, kind, key, entry.properties.dtype, at, (1, *size[1:]), size[1:])

    def _name_in_model(self, name: str) -> str:
        if self.args.get("transformer_impl") == "local":
            for fused, local in _LOCAL_NAMES.items():
                name = name.replace(fused, local)
        return name

    def pieces(self, tensor: Tensor, max_numel: int = 1 << 24) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor, flat, in row-major order."""
        whole = Area(tensor.key, (), tensor.offset, tensor.box, 0)
        for box in whole.part(0, whole.numel, max_numel):
            out = torch.empty(box.shape, dtype=tensor.dtype)
            filled = 0
            for where, values in self.reader.read(tensor.key, box.offset, box.shape):
                out[where] = values
                filled += values.numel()
            if filled < box.numel:
                raise ValueError(f"{self.folder} lacks elements of {tensor.key} at {box.offset}: it is not complete")
            yield out.reshape(-1)

    def digest(self, vocab_size: int | None = None) -> str:
        """Return the state digest that a run with --log-state-digest would print after loading this checkpoint."""
        vocab_size = vocab_size if vocab_size is not None else self.ours.get("vocab_size")
        trained = {_STATE.fullmatch(key)[2] for key in self.reader.tensors() if _STATE.fullmatch(key)}  # type: ignore[index]
        if not trained or self.step is None:
            raise ValueError(f"{self.folder} has no optimizer state, which a digest is made of: use `verify` instead")
        entries = []
        for tensor in self.tensors(vocab_size):
            match = _STATE.fullmatch(tensor.key)
            if (match[2] if match else tensor.key) not in trained:
                continue
            total = hashlib.sha256()
            for piece in self.pieces(tensor):
                total.update(piece.view(torch.uint8).numpy())
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(DigestEntry(tensor.name, tensor.kind, dtype, tensor.shape, total.hexdigest()))
        return combine(entries, self.step)

    def norm(self, tensor: Tensor) -> float:
        """Return the Euclidean norm of a tensor, summed in fp64."""
        return math.sqrt(sum(float(piece.double().square().sum()) for piece in self.pieces(tensor)))


def open_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint's own folder, or the one that a directory's tracker (or `step`) names."""
    if (path / layout.CONFIG).exists():
        return Checkpoint(path)
    place = layout.find_checkpoint(path, step)
    if place is None:
        raise ValueError(f"{path} holds no checkpoint: name the directory given to --save, or iter_NNNNNNN in it")
    if not (place[0] / layout.CONFIG).exists():
        raise ValueError(
            f"{place[0]} is in Megatron's old torch format, which only training can load (same tensor and pipeline "
            "parallel sizes): --load it and save it anew"
        )
    return Checkpoint(place[0])


def problems(checkpoint: Checkpoint) -> list[str]:
    """Return one sentence for everything that is wrong with files, pickles and completeness; nothing is executed."""
    folder, reader = checkpoint.folder, checkpoint.reader
    found = []
    sums = read_checksums(folder)
    for name, digest in sorted((sums or {}).items()):
        wrong = verify_file(folder, name, digest)
        if wrong:
            found.append(wrong)
    for name, least in sorted(reader.files().items()):
        path = folder / name
        if not path.exists() or path.stat().st_size < least:
            found.append(f"{path} is missing or shorter than the {least} bytes that the index names")
    if not found:
        with open(folder / layout.COMMON, "rb") as file:
            check_pickle(file, str(folder / layout.COMMON))
        for key in reader.objects():
            reader.read_object(key)
    for key, entry in reader.tensors().items():
        have = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if have != math.prod(entry.size):
            found.append(f"{folder}: {key} has {have} of {math.prod(entry.size)} elements")
    return found


def misfits(args: Mapping[str, Any], tensor: int, pipeline: int, data: int) -> list[str]:
    """Return why a checkpoint with these arguments cannot run at TP x PP x DP; empty if it can."""
    found = []
    for name, flag in (
        ("num_attention_heads", "attention heads"),
        ("num_query_groups", "query groups"),
        ("ffn_hidden_size", "rows of the feed-forward layer"),
    ):
        value = args.get(name)
        if isinstance(value, int) and value % tensor and not (name == "num_query_groups" and tensor % value == 0):
            found.append(f"{value} {flag} do not divide by a tensor parallel size of {tensor}")
    layers = args.get("num_layers")
    if isinstance(layers, int) and layers % pipeline:
        found.append(f"{layers} layers do not divide by a pipeline parallel size of {pipeline}")
    batch, micro = args.get("global_batch_size"), args.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data):
        found.append(f"a global batch of {batch} does not divide by micro-batches of {micro} on {data} data ranks")
    return found


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors differ: elements that do, and the largest distance in units in the last place."""

    name: str
    kind: str
    num_different: int
    numel: int
    max_ulp: int
    note: str = ""


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Yield a line for every tensor that is not the same in both, bit by bit."""
    theirs = {(t.name, t.kind): t for t in second.tensors()}
    for tensor in first.tensors():
        other = theirs.pop((tensor.name, tensor.kind), None)
        if other is None:
            yield Difference(tensor.name, tensor.kind, 0, 0, 0, "only in the first")
        elif (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            yield Difference(tensor.name, tensor.kind, 0, 0, 0, f"{_kind(tensor)} and {_kind(other)}")
        else:
            num, most = 0, 0
            for a, b in zip(first.pieces(tensor), second.pieces(other), strict=True):
                distance = (ordered_bits(a) - ordered_bits(b)).abs()
                num += int(torch.count_nonzero(distance))
                most = max(most, int(distance.max()) if distance.numel() else 0)
            if num:
                yield Difference(tensor.name, tensor.kind, num, math.prod(tensor.shape), most)
    for name, kind in theirs:
        yield Difference(name, kind, 0, 0, 0, "only in the second")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Return floats as int64 in the order of the numbers: neighbors differ by 1, -0 and +0 by 1, too."""
    if not values.dtype.is_floating_point:
        return values.to(torch.int64)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.view(integers).to(torch.int64)
    low = -(1 << (values.dtype.itemsize * 8 - 1))
    return torch.where(bits < 0, low - bits - 1, bits)
