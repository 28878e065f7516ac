"""Where megatron-core's DDP puts parameters and gradients, computed without it; what each rank then owns.

The rules of megatron-core 0.16 with the distributed optimizer: parameters lie in reverse order of registration, each
start is a multiple of 64 elements, each bucket ends at a multiple of lcm(data-parallel size, 128), a bucket closes once
it holds `bucket_size` elements, and a copy of a tied embedding has a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from deep_offload.model.gpt import GPTShape, ParallelShape, Param, chunk_params
from deep_offload.plan.layout import ShardSpec

_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, end) of a chunk's buffer, padding included; offsets: where each parameter lies, by name."""

    start: int
    end: int
    offsets: tuple[tuple[str, int, int], ...]

    @property
    def numel(self) -> int:
        return self.end - self.start


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements at which DDP closes a bucket unless told otherwise."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def ddp_buckets(params: Sequence[Param], data_parallel_size: int, bucket_size: int | None) -> tuple[Bucket, ...]:
    """Buckets of one chunk in DDP's order, which is that of the backward pass. bucket_size None: a single bucket."""
    align = math.lcm(data_parallel_size, _BUCKET_ALIGNMENT)
    buckets: list[Bucket] = []
    offsets: list[tuple[str, int, int]] = []
    bucket_start = position = 0

    def close(end: int) -> int:
        nonlocal bucket_start, offsets
        padded = _round_up(end, align)
        buckets.append(Bucket(bucket_start, padded, tuple(offsets)))
        bucket_start, offsets = padded, []
        return padded

    for param in reversed(params):
        start = _round_up(position, _PARAM_ALIGNMENT)
        if param.is_shared_embedding and offsets:
            start = close(start)
        position = start + param.numel
        offsets.append((param.name, start, position))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if is_full or param.is_shared_embedding:
            position = close(position)
    if offsets:
        close(position)
    return tuple(buckets)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """DDP's buffers on one rank: the buckets of each model chunk."""

    chunks: tuple[tuple[Bucket, ...], ...]
    data_parallel_size: int

    @property
    def numel(self) -> int:
        """Elements of the parameter buffers, and of the gradient buffers, padding included."""
        return sum(bucket.numel for chunk in self.chunks for bucket in chunk)

    def shards(self, param_bytes: int, grad_bytes: int) -> tuple[ShardSpec, ...]:
        """This rank's slices in forward order: one equal part of every bucket."""
        return tuple(
            ShardSpec(bucket.numel // self.data_parallel_size, param_bytes, grad_bytes)
            for chunk in self.chunks
            for bucket in reversed(chunk)
        )


@lru_cache(maxsize=16)  # bytes, seconds and subgroups of a run ask for the same ones; deep models have many
def rank_buffers(
    shape: GPTShape,
    parallel: ParallelShape,
    pipeline_rank: int = 0,
    *,
    overlap_grad_reduce: bool = False,
    bucket_size: int | None = None,
) -> RankBuffers:
    """DDP's buffers on a rank of this pipeline stage.

    DDP buckets only where reductions overlap with the backward pass, on the first pipeline stage and its first chunk.
    bucket_size: elements; None: DDP's own choice.
    """
    wanted = bucket_size or default_bucket_size(parallel.data)
    chunks = []
    for stage in range(parallel.virtual):
        is_bucketed = overlap_grad_reduce and pipeline_rank == 0 and stage == 0
        params = chunk_params(shape, parallel, pipeline_rank, stage)
        chunks.append(ddp_buckets(params, parallel.data, wanted if is_bucketed else None))
    return RankBuffers(tuple(chunks), parallel.data)
