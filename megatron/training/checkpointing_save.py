"""Saving: every rank writes the ranges that it owns, front to back, and the first rank makes them a checkpoint.

Nothing is gathered and nothing is copied but one box of each file at a time, so a save takes next to no memory on host
and device.
All ranks exchange words at two points only, each with the errors of all: a full disk on one rank ends the save
everywhere, and training goes on.
"""

from __future__ import annotations

import hashlib
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from deep_offload.optimizer.checkpoint_boxes import Area, Shape
from deep_offload.optimizer.checkpoint_state import STATE_KINDS, WEIGHT, ParamState, areas_of_entry, state_key
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.ranks import from_all_ranks
from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import (
    CONFIG_TEXT,
    BoxWriter,
    WrittenFile,
    build_index,
    missing_parts,
)
from megatron.training.checkpointing_safety import checksum_lines
from megatron.training.config import TrainingConfig

OUR_KEY = "deep_offload"
NUM_FILES = 2
"""Files of a rank, as many as Megatron writes by default: a checksum keeps one core busy for each."""

OUR_FORMAT = 1
"""Number of what we write beside megatron-core's own; a reader refuses higher ones."""

MODEL_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, slots=True)
class SaveItem:
    """Something to write: a box of a tensor, read when its turn comes, or an object (whose shapes are empty)."""

    key: str
    read: Callable[[], Any]
    global_shape: Shape | None = None
    offset: Shape = ()
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save went: bytes of all ranks, seconds that training stood still; error is None for a complete one."""

    iteration: int
    num_bytes: int
    seconds: float
    error: str | None = None


def model_state(chunks: list[DistributedDataParallel], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return megatron-core's sharded state of all chunks, whose tensors are the parameters themselves."""
    states = {}
    for number, chunk in enumerate(chunks):
        name = "model" if len(chunks) == 1 else f"model{number}"
        states[name] = unwrap_model(chunk).sharded_state_dict(metadata=dict(metadata))
    return states


def own_items(
    state: dict[str, Any], params: ParamState, with_optimizer: bool, objects: Iterable[ShardedObject]
) -> Iterator[SaveItem]:
    """Yield everything that this rank writes; together all ranks write every element once."""
    trained = {id(param): number for number, param in enumerate(params.params)}
    areas: dict[int, list[Area]] = {}
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            number = trained.get(id(entry.data))
            if number is None:
                if _is_main(entry.replica_id, ()):
                    yield from _whole(entry)
            elif _is_main(entry.replica_id, (-1,)):  # its data-parallel ranks share the work
                areas[number] = areas_of_entry(entry)
    for obj in (*(e for e in nested_values(state) if isinstance(e, ShardedObject)), *objects):
        if _is_main(obj.replica_id, ()):
            yield SaveItem(obj.unique_key, _always(obj.data))
    kinds = (WEIGHT, *STATE_KINDS) if with_optimizer else (WEIGHT,)
    for where in params.ranges():
        for area in areas.get(where.number, ()):
            for box in area.part(where.start, where.end):
                for kind in kinds:
                    read = _reader(params, where, kind, box)
                    yield SaveItem(state_key(kind, box.key), read, box.global_shape, box.offset, box.shape)


def _whole(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[SaveItem]:
    flat = entry.data.detach().reshape(-1)
    for area in areas_of_entry(entry):
        for box in area.part(0, flat.numel()):
            values = flat[box.flat_start : box.flat_start + box.numel]
            yield SaveItem(box.key, _always(values), box.global_shape, box.offset, box.shape)


def _reader(params: ParamState, where: Any, kind: str, box: Area) -> Callable[[], torch.Tensor]:
    return lambda: params.read(where, kind, box.flat_start, box.flat_start + box.numel)


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _is_main(replica_id: Any, ignored: tuple[int, ...]) -> bool:
    """Whether a copy is the one that is written; ignored: places in the id that name data-parallel ranks."""
    if isinstance(replica_id, int):
        return replica_id == 0 or bool(ignored)
    parts = list(replica_id)
    for place in ignored:
        parts[place] = 0
    return not any(parts)


# -- common state -----------------------------------------------------------------------------------------------------


def common_state(
    config: TrainingConfig,
    optimizer: DeepOffloadOptimizer,
    scheduler: Any,
    progress: dict[str, int],
    ours: dict[str, Any],
    with_optimizer: bool,
) -> dict[str, Any]:
    """Return what all ranks share, in Megatron's places: arguments, schedule, groups, loss scale, progress.

    Plain Python and tensors only: the file opens with torch.load(weights_only=True).
    """
    state: dict[str, Any] = {
        "args": Namespace(**saved_arguments(config), **progress),
        "checkpoint_version": 3.0,
        "iteration": progress["iteration"],
        "content_metadata": dict(MODEL_METADATA),
        "opt_param_scheduler": scheduler.state_dict(),
        OUR_KEY: {"format": OUR_FORMAT, **ours, **progress},
    }
    if with_optimizer:
        optim = config.optim
        groups = []
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if k != "params"}
            # What torch's and TransformerEngine's Adam look for in a group.
            plain |= {"betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_eps, "amsgrad": False}
            plain |= {"step": optimizer.num_steps, "bias_correction": True}
            groups.append(plain)
        state["optimizer"] = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": MODEL_METADATA["distrib_optim_sharding_type"],
        }
        scaler = optimizer.scaler_state()
        if scaler is not None:
            state["optimizer"]["grad_scaler"] = {k: _on_host(v) for k, v in scaler.items()}
    return state


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def saved_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return every setting by its flag's name with underscores, as plain Python."""
    values: dict[str, Any] = {}
    for section in fields(config):
        value = getattr(config, section.name)
        if is_dataclass(value):
            values.update({inner.name: _plain(getattr(value, inner.name)) for inner in fields(value)})
        elif section.name != "notes":
            values[section.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value) if type(value) in (list, tuple) else [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bool | int | float | str):  # an enum's value
        return getattr(value, "value", value)
    return str(value)


# -- the save ---------------------------------------------------------------------------------------------------------


def write_own(folder: Path, items: Iterable[SaveItem]) -> list[WrittenFile]:
    """Write this rank's files into the hidden folder, all at once, and wait until the disk has them.

    Reads on the caller's CUDA stream.
    """
    parts = _halves(items)
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def write(number: int) -> WrittenFile:
        if stream is not None:  # a thread begins on the first GPU, and leaving the block would make a context there
            torch.cuda.set_device(stream.device)
        with torch.cuda.stream(stream):
            return _write_file(folder, f"__{dist.get_rank()}_{number}.distcp", parts[number])

    with ThreadPoolExecutor(NUM_FILES, thread_name_prefix="checkpoint-file") as threads:
        return list(threads.map(write, range(NUM_FILES)))


def _halves(items: Iterable[SaveItem]) -> list[list[SaveItem]]:
    """Items for each file, in their order: each goes to the file with the fewest elements."""
    parts: list[list[SaveItem]] = [[] for _ in range(NUM_FILES)]
    sizes = [0] * NUM_FILES
    for item in items:
        number = sizes.index(min(sizes))
        parts[number].append(item)
        sizes[number] += math.prod(item.shape)
    return parts


def _write_file(folder: Path, name: str, items: Iterable[SaveItem]) -> WrittenFile:
    with BoxWriter(folder, name) as writer:
        for item in items:
            value = item.read()
            if item.global_shape is None:
                writer.add_object(item.key, value)
            else:
                writer.add_tensor(item.key, item.global_shape, item.offset, item.shape, value)
        return writer.finish()


def write_common(folder: Path, common: dict[str, Any], files: list[WrittenFile]) -> None:
    """On the first rank: add what makes the ranks' files a checkpoint; checksums go last."""
    missing = missing_parts(files)
    assert not missing, f"no rank wrote {missing}"
    with BoxWriter(folder, layout.COMMON) as writer:
        writer.stream.save(common)
        written = writer.finish()
    index = build_index(files)
    layout.write_file(folder / layout.METADATA, index)
    layout.write_file(folder / layout.CONFIG, CONFIG_TEXT.encode())
    sums = {file.name: file.sha256 for file in (*files, written)}
    sums |= {name: sha256_of(data) for name, data in ((layout.METADATA, index), (layout.CONFIG, CONFIG_TEXT.encode()))}
    layout.write_file(folder / layout.CHECKSUMS, checksum_lines(sums))


def sha256_of(data: bytes) -> str:
    """Return the hex digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def together(work: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """Do this rank's part of a collective step; returns (results by rank, first error of all ranks)."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001 - the other ranks wait for this one's word
        error = f"rank {dist.get_rank()}: {type(caught).__name__}: {caught}"
    everyone = from_all_ranks((result, error))
    errors = [error for _, error in everyone if error is not None]
    return [result for result, _ in everyone], errors[0] if errors else None


def save_checkpoint(
    root: Path,
    iteration: int,
    items: Callable[[], Iterable[SaveItem]],
    common: Callable[[], dict[str, Any]],
    *,
    keep_last: int | None,
    retain_interval: int | None,
) -> SaveResult:
    """Write one checkpoint; collective over all ranks. An error of any rank leaves older checkpoints as they were."""
    started = time.monotonic()
    is_first = dist.get_rank() == 0
    _, error = together(lambda: layout.begin(root, iteration) if is_first else None)
    written: list[list[WrittenFile] | None] = []
    if error is None:
        folder = layout.unfinished_folder(root, iteration)
        written, error = together(lambda: write_own(folder, items()))
    files = [file for own in written for file in own or ()]
    if error is None:
        error = complete(root, iteration, files, common, keep_last, retain_interval)
    if error is not None and is_first:
        layout.discard(root, iteration)
    num_bytes = sum(file.num_bytes for file in files)
    return SaveResult(iteration, num_bytes, time.monotonic() - started, error)


def complete(
    root: Path,
    iteration: int,
    files: list[WrittenFile],
    common: Callable[[], dict[str, Any]],
    keep_last: int | None,
    retain_interval: int | None,
) -> str | None:
    """Make written files a checkpoint, let the tracker name it, delete old ones; returns the first rank's error."""

    def work() -> None:
        if dist.get_rank() == 0:
            write_common(layout.unfinished_folder(root, iteration), common(), files)
            layout.publish(root, iteration)
            layout.write_tracker(root, iteration)
            layout.remove_old(root, keep_last, retain_interval)

    return together(work)[1]
