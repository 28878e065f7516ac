"""The only code that reads the insides of megatron-core's DistributedDataParallel.

Attributes read: DDP.{buffers, expert_parallel_buffers, bucket_groups, expert_parallel_bucket_groups, ddp_config,
config};
buffer.{buckets, param_index_map, data_parallel_group}; bucket.{param_data, grad_data, offset, params_list,
gradient_scaling_factor}; bucket_group.{buckets, is_last_microbatch}. `tests/optimizer/test_megatron_contract.py` names
each, so that a new megatron-core breaks one file with one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from deep_offload.optimizer.engine import Segment, Shard


@dataclass(frozen=True, slots=True)
class ParamPiece:
    """Part of a parameter in this rank's slice: elements [param_start, param_start + numel) of the flat parameter
    are elements [shard_start, ...) of shard number `shard`."""

    shard: int
    shard_start: int
    param_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BucketShard:
    """This data-parallel rank's slice of one bucket, with what is needed to reduce, gather and name it."""

    shard: Shard
    bucket_group: Any
    chunk_index: int
    group: torch.distributed.ProcessGroup
    """The data-parallel group whose ranks own the other slices."""


@dataclass(frozen=True, slots=True)
class BufferMap:
    """All slices of this rank in forward order, the parameters in them, and which pieces each parameter has here."""

    shards: tuple[BucketShard, ...]
    params: tuple[torch.nn.Parameter, ...]
    pieces: tuple[tuple[ParamPiece, ...], ...]
    """pieces[p] belong to params[p]; empty where other ranks own all of it."""

    def number_of(self) -> dict[torch.nn.Parameter, int]:
        return {param: number for number, param in enumerate(self.params)}


def map_buffers(chunks: Sequence[DistributedDataParallel]) -> BufferMap:
    """Find this rank's slices. Raises ValueError when DDP was built without `use_distributed_optimizer`."""
    if not all(chunk.ddp_config.use_distributed_optimizer for chunk in chunks):
        raise ValueError(
            "the model is wrapped by DistributedDataParallel without use_distributed_optimizer, but its "
            "parameters must lie "
            "in DDP's flat buffers: set DistributedDataParallelConfig(use_distributed_optimizer=True)"
        )
    shards: list[BucketShard] = []
    params: list[torch.nn.Parameter] = []
    pieces: list[list[ParamPiece]] = []
    numbers: dict[torch.nn.Parameter, int] = {}
    for chunk_index, group, bucket, buffer in _buckets_in_forward_order(chunks):
        process_group = buffer.data_parallel_group
        numel = bucket.grad_data.numel() // process_group.size()
        low = bucket.offset + numel * process_group.rank()
        segments: list[Segment] = []
        for param in bucket.params_list:
            number = numbers.setdefault(param, len(params))
            if number == len(params):
                params.append(param)
                pieces.append([])
            param_start, param_end, _bucket = buffer.param_index_map[param]
            start, end = max(param_start, low), min(param_end, low + numel)
            if start < end:
                segments.append(Segment(start - low, end - low, number))
                pieces[number].append(ParamPiece(len(shards), start - low, start - param_start, end - start))
        local = slice(low - bucket.offset, low - bucket.offset + numel)
        shard = Shard(
            bucket.param_data.detach()[local],
            bucket.grad_data.detach()[local],
            tuple(sorted(segments, key=lambda s: s.start)),
        )
        shards.append(BucketShard(shard, group, chunk_index, process_group))
    return BufferMap(tuple(shards), tuple(params), tuple(tuple(p) for p in pieces))


def _buckets_in_forward_order(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[int, Any, Any, Any]]:
    """(chunk index, bucket group, bucket, buffer); DDP lays buckets out in backward order."""
    for chunk_index, chunk in enumerate(chunks):
        owner = {id(b): buffer for buffer in chunk.buffers + chunk.expert_parallel_buffers for b in buffer.buckets}
        for group in reversed(chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                yield chunk_index, group, bucket, owner[id(bucket)]


def gradients_are_final_in_backward(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether nothing changes a gradient after the last micro-batch's backward has accumulated it.

    True on one rank without per-token scaling: there is no reduction, no tied copy on another stage and no
    sequence-parallel norm to sum.
    """
    config = chunks[0].config
    return (
        torch.distributed.get_world_size() == 1
        and not config.calculate_per_token_loss
        and all(b.gradient_scaling_factor == 1.0 for c in chunks for g in c.bucket_groups for b in g.buckets)
    )


class BackwardHooks:
    """Calls `on_ready(number)` when the gradient of parameter `number` is final in the last micro-batch's backward.

    The hooks run behind DDP's own, which add the gradient to the buffer. How often a parameter's hook fires in one
    backward is learned from the first one, as DDP does it; `on_again(number)` is called if a gradient changes after
    it was
    said to be final.
    """

    def __init__(self, buffers: BufferMap, on_ready: Callable[[int], None], on_again: Callable[[int], None]) -> None:
        self._on_ready = on_ready
        self._on_again = on_again
        self._expected: dict[int, int] | None = None
        self._seen: dict[int, int] = {}
        self._accumulators: list[Any] = []  # autograd drops hooks with the node, so it must stay alive
        groups = {s.param: b.bucket_group for b in buffers.shards for s in b.shard.segments}
        for number, param in enumerate(buffers.params):
            if number in groups:
                node = param.expand_as(param).grad_fn.next_functions[0][0]
                node.register_hook(self._hook(number, groups[number]))
                self._accumulators.append(node)

    def _hook(self, number: int, bucket_group: Any) -> Callable[..., None]:
        def hook(*_unused: Any) -> None:
            if not bucket_group.is_last_microbatch:
                return
            self._seen[number] = self._seen.get(number, 0) + 1
            if self._expected is None:
                return
            expected = self._expected.get(number, 0)
            if self._seen[number] == expected:
                self._on_ready(number)
            elif self._seen[number] > expected:
                self._expected = None  # the graph changed: learn it again
                self._on_again(number)

        return hook

    def end_of_backward(self) -> None:
        """The iteration's gradients are complete; forget its counts, keep what they teach."""
        if self._expected is None:
            self._expected = self._seen
        self._seen = {}
