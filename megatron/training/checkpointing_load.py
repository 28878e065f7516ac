"""Loading: every rank reads the ranges that it owns, from whatever boxes the checkpoint has.

The layout, the placement and the storage of the run that saved do not matter: fp32 states arrive with the same bits.
16-bit weights follow from the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from deep_offload.optimizer.checkpoint_boxes import Area
from deep_offload.optimizer.checkpoint_state import (
    MASTER,
    STATE_KINDS,
    WEIGHT,
    ParamState,
    areas_of_entry,
    areas_of_params,
    state_key,
)
from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import CheckpointReader, check_shapes, flat_values
from megatron.training.checkpointing_safety import PATH_ERRORS, load_checked, read_checksums, verify_files
from megatron.training.checkpointing_save import NUM_FILES, OUR_FORMAT, OUR_KEY, together


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that exists: its folder and the iteration in its name (`release` has none)."""

    folder: Path
    iteration: int | str


def find(root: str, step: int | None) -> Found | None:
    """Return the checkpoint to load as the first rank sees it; collective. Raises ValueError as `find_checkpoint`."""

    def look() -> tuple[str, int | str] | None:
        if dist.get_rank() != 0:
            return None
        place = layout.find_checkpoint(Path(root), step)
        return None if place is None else (str(place[0]), place[1])

    places, error = together(look)
    _raise(error)
    place = places[0]
    return None if place is None else Found(Path(place[0]), place[1])


def agree(work: Callable[[], Any]) -> Any:
    """Do this rank's part on all ranks and return its result; raises the first error of any of them on all."""
    own: list[Any] = []
    caught: list[Exception] = []

    def attempt() -> None:
        try:
            own.append(work())
        except Exception as error:
            caught.append(error)
            raise

    _, error = together(attempt)
    _raise(error, *caught)
    return own[0]


def _raise(error: str | None, own: Exception | None = None) -> None:
    """Raise what `together` reports, `rank N: KIND: TEXT`, as the same exception on all ranks; nothing for None.

    ValueError, one sentence, is for the user: settings, a checkpoint that does not fit, a path. All else is a fault of
    the run. own: what this rank raised, whose trace is shown with it.
    """
    if error is None:
        return
    rank, _, text = error.partition(": ")
    kind, _, sentence = text.partition(": ")
    if kind == "ValueError":
        raise ValueError(sentence) from own
    if kind in [error.__name__ for error in PATH_ERRORS]:
        raise ValueError(f"{rank} cannot read the checkpoint ({sentence}): give one that all ranks can read") from own
    if kind == torch.OutOfMemoryError.__name__:
        raise torch.OutOfMemoryError(f"{rank}: {sentence}") from own
    raise RuntimeError(error) from own


def verify(folder: Path) -> bool:
    """Check every file against its checksum, each rank its share; returns False where a checkpoint has none.

    Raises ValueError naming the first damaged file. Collective.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def look() -> bool:
        sums = read_checksums(folder)
        if sums is None:
            _check_sizes(folder)
            return False
        verify_files(folder, sorted(sums)[rank::size], sums, NUM_FILES)
        return True

    return bool(agree(look))


def _check_sizes(folder: Path) -> None:
    """Without checksums at least find files that are cut short."""
    for name, least in CheckpointReader(folder).files().items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size < least:
            said = "is missing" if size < 0 else f"has {size} bytes and needs {least}"
            raise ValueError(f"{path} {said}: load another checkpoint with --ckpt-step")


def read_common(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's common state. Raises ValueError for a file that is torn, dangerous or too new."""
    path = folder / layout.COMMON
    if not path.exists():
        raise ValueError(
            f"{folder} has no {layout.COMMON}: it is no checkpoint of megatron-core, name another directory"
        )
    common = load_checked(path, str(path))
    if not isinstance(common, dict):
        raise ValueError(f"{path} holds no dictionary: load another checkpoint with --ckpt-step")
    ours = common.get(OUR_KEY)
    number = ours.get("format") if isinstance(ours, dict) else None
    if number is not None and not (isinstance(number, int) and 1 <= number <= OUR_FORMAT):
        raise ValueError(
            f"{folder} has format {number} of a newer deep-offload, this one reads up to {OUR_FORMAT}: update it"
        )
    return common


# -- tensors ----------------------------------------------------------------------------------------------------------


def load_weights_alone(reader: CheckpointReader, state: dict[str, Any], params: ParamState) -> None:
    """Weights from the file, in its own precision: masters take it too. Moments become zero."""
    areas = areas_of_params(state, params.params)
    _check(reader, areas, (WEIGHT,))
    _load_untrained(reader, state, params)
    _load_ranges(reader, areas, params, (WEIGHT,))
    params.clear_moments()


def load_training_state(reader: CheckpointReader, state: dict[str, Any], params: ParamState) -> None:
    """Masters and moments from the file; weights follow from the masters."""
    areas = areas_of_params(state, params.params)
    _check(reader, areas, STATE_KINDS)
    _load_untrained(reader, state, params)
    _load_ranges(reader, areas, params, STATE_KINDS)


def has_training_state(reader: CheckpointReader) -> bool:
    """Whether the checkpoint has optimizer state under the parameters' names."""
    return any(key.startswith("optimizer.state.") for key in reader.tensors())


def _check(reader: CheckpointReader, areas: Sequence[Sequence[Area]], kinds: Sequence[str]) -> None:
    wanted = [
        (state_key(kind, area.key), area.global_shape, area.may_differ)
        for own in areas
        for area in own
        for kind in kinds
    ]
    check_shapes(reader, wanted)


@torch.no_grad()
def _load_ranges(
    reader: CheckpointReader, areas: Sequence[Sequence[Area]], params: ParamState, kinds: Sequence[str]
) -> None:
    for where in params.ranges():
        for area in areas[where.number]:
            for box in area.part(where.start, where.end):
                end = box.flat_start + box.numel
                for kind in kinds:
                    # Rows that the file does not have (another padding of the vocabulary): weights stay, moments are 0.
                    fill = torch.zeros(box.numel)
                    if kind in (WEIGHT, MASTER) and box.may_differ:
                        fill = params.read(where, MASTER, box.flat_start, end).to("cpu", torch.float32)
                    values = flat_values(reader, state_key(kind, box.key), box.offset, box.shape, fill)
                    params.write(where, kind, box.flat_start, values)


@torch.no_grad()
def _load_untrained(reader: CheckpointReader, state: dict[str, Any], params: ParamState) -> None:
    """Frozen parameters and buffers, which every rank holds whole."""
    trained = {id(param) for param in params.params}
    entries = [
        entry
        for entry in nested_values(state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and id(entry.data) not in trained
    ]
    _check(reader, [areas_of_entry(entry) for entry in entries], (WEIGHT,))
    for entry in entries:
        flat = entry.data.detach().view(-1)
        for area in areas_of_entry(entry):
            for box in area.part(0, flat.numel()):
                target = flat[box.flat_start : box.flat_start + box.numel]
                target.copy_(flat_values(reader, box.key, box.offset, box.shape, target.cpu()))
