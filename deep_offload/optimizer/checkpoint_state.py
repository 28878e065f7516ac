"""A rank's own part of weights and optimizer state, parameter by parameter: what a checkpoint writes and reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from deep_offload.optimizer.checkpoint import CHECKPOINT_KEYS
from deep_offload.optimizer.checkpoint_boxes import Area
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.megatron_buffers import BucketPlace, BufferMap
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER

WEIGHT = "weight"
"""Kind of the parameter itself, beside master, exp_avg and exp_avg_sq."""

STATE_KINDS = (MASTER, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class OwnRange:
    """Elements [start, end) of flat parameter `number` are this rank's; they lie in one subgroup and one bucket."""

    number: int
    start: int
    end: int
    subgroup: int
    subgroup_start: int
    bucket: BucketPlace
    bucket_start: int


class ParamState:
    """Reads and writes ranges of parameters' weights and fp32 state, wherever the engine keeps them.

    Call `synchronize` of the optimizer before the first read; nothing may update meanwhile.
    """

    def __init__(self, buffers: BufferMap, engine: OffloadEngine) -> None:
        self._buffers = buffers
        self._engine = engine

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        """All trainable parameters of this model-parallel rank; their numbers are their places here."""
        return self._buffers.params

    def ranges(self) -> Iterator[OwnRange]:
        """What this rank owns, cut at parameters and subgroups, in the order of the subgroups."""
        subgroups: dict[int, list[Any]] = {}
        for s in self._engine.layout.subgroups:
            subgroups.setdefault(s.shard, []).append(s)
        for number, pieces in enumerate(self._buffers.pieces):
            for piece in pieces:
                bucket = self._buffers.shards[piece.shard].bucket
                end = piece.shard_start + piece.numel
                for s in subgroups[piece.shard]:
                    low, high = max(s.start, piece.shard_start), min(s.start + s.numel, end)
                    if low < high:
                        at = piece.param_start + low - piece.shard_start
                        place = bucket.start + low
                        yield OwnRange(number, at, at + high - low, s.index, low - s.start, bucket, place)

    def read(self, where: OwnRange, kind: str, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of the flat parameter, inside `where`: weights in their type, states in fp32.

        May be a view of the engine's own memory, on any device: do not write, and read before the next update.
        """
        low = where.subgroup_start + start - where.start
        high = low + end - start
        if kind == WEIGHT:
            return self._engine.read_weight(where.subgroup, low, high)
        return self._engine.read_state(where.subgroup, low, high, (kind,))[kind]

    def write(self, where: OwnRange, kind: str, start: int, values: torch.Tensor) -> None:
        """Overwrite from element `start` of the flat parameter; a master, or a weight, also sets the other of the
        two."""
        low = where.subgroup_start + start - where.start
        name = MASTER if kind == WEIGHT else kind
        self._engine.write_state(where.subgroup, name, low, values.reshape(-1).float())

    def clear_moments(self) -> None:
        """Both moments become zero, as at the start of a run."""
        for where in self.ranges():
            zeros = torch.zeros(where.end - where.start)
            for kind in (EXP_AVG, EXP_AVG_SQ):
                self.write(where, kind, where.start, zeros)


def areas_of_params(model_state: dict[str, Any], params: Sequence[torch.nn.Parameter]) -> list[list[Area]]:
    """For each parameter where its local elements lie in the checkpoint's tensors of weights.

    model_state: the model's sharded_state_dict, which holds the parameters themselves.
    """
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    missing = [tuple(p.shape) for p in params if id(p) not in entries]
    if missing:
        raise ValueError(
            f"parameters of shapes {missing} are not in the model's sharded state dict: make it with "
            "sharded_state_dict() of the unwrapped model, which keeps parameters"
        )
    return [areas_of_entry(entries[id(p)]) for p in params]


def areas_of_entry(entry: ShardedTensor | ShardedTensorFactory) -> list[Area]:
    """Where the elements of one entry's local tensor lie; a factory (gated linear units) makes several areas."""
    if isinstance(entry, ShardedTensor):
        return [_area(entry, 0)]
    areas = []
    whole = entry.data.detach()
    for part in nested_values(entry.build()):
        assert part.data.is_contiguous(), f"{part.key} is cut across rows"
        areas.append(_area(part, part.data.storage_offset() - whole.storage_offset()))
    return areas


def _area(entry: ShardedTensor, flat_start: int) -> Area:
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    return Area(
        entry.key, tuple(entry.global_shape), tuple(entry.global_offset), shape, flat_start, entry.allow_shape_mismatch
    )


def state_key(kind: str, weight_key: str) -> str:
    """The checkpoint's name of a parameter's state, as megatron-core's fully reshardable optimizer writes it."""
    return weight_key if kind == WEIGHT else f"optimizer.state.{CHECKPOINT_KEYS[kind]}.{weight_key}"
