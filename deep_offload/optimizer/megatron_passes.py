"""Where passes of the training loop meet the engine: who waits for what, and which gradients are final when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.megatron_buffers import (
    BufferMap,
    ForwardGathers,
    late_params,
    reset_counts,
    wait_in_forward,
    watch_backward,
)


class TrainingPasses:
    """Hooks of the model that say when gradients are final and wait for parameters where they are read.

    Settled: gradients may be overwritten and parameters are in place on all ranks, or their gathers are under way.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], buffers: BufferMap, engine: OffloadEngine) -> None:
        self._chunks = list(chunks)
        self._engine = engine
        self._is_alone = all(b.group.size() == 1 for b in buffers.shards)
        self.is_settled = True
        self._must_zero = False
        self._subgroups_of = [
            {
                s.index
                for piece in pieces
                for s in engine.subgroups_of(piece.shard, piece.shard_start, piece.shard_start + piece.numel)
            }
            for pieces in buffers.pieces
        ]
        self._missing: list[int] = []
        self._count_missing()
        self._backward = watch_backward(
            chunks,
            buffers,
            late_params(chunks, buffers),
            on_param=self._param_ready,
            on_shards=self._shards_reduced,
            on_again=lambda _number: engine.skip_update(),
        )
        self._gathers: ForwardGathers | None = None
        self._chunks[-1].register_forward_hook(self._after_forward)
        if self._is_alone:
            ends = [max(subgroups, default=-1) + 1 for subgroups in self._subgroups_of]
            wait_in_forward(chunks, dict(zip(buffers.params, ends)), engine.wait_for_params)
        elif all(chunk.ddp_config.overlap_param_gather for chunk in chunks):
            ends = [0] * (len(buffers.shards) + 1)
            for subgroup in engine.layout.subgroups:
                ends[subgroup.shard + 1] = subgroup.index + 1
            before = list(itertools.accumulate(ends, max))
            self._gathers = ForwardGathers(chunks, buffers, lambda count: engine.wait_for_params(before[count]))

    @property
    def waits_in_passes(self) -> bool:
        """Whether each module's forward pass waits for its own parameters; else all are waited for before the first."""
        return self._is_alone or self._gathers is not None

    def begin_step(self) -> None:
        """See `DeepOffloadOptimizer.begin_step`."""
        for chunk in self._chunks:
            reset_counts(chunk)
        self._must_zero = True
        if self.is_settled or not self.waits_in_passes:
            self.settle()
            self._zero_grads()
        elif self._gathers is not None:
            self.is_settled = True
            self._gathers.begin()

    def end_of_backward(self) -> None:
        """All gradients of the iteration are there; forget what was counted of them."""
        if self._backward is not None:
            self._backward.end_of_backward()
        self._count_missing()

    def settle(self) -> None:
        """Wait for the update, and start what brings parameters to the other ranks."""
        self._engine.wait_until_reusable()
        if self.is_settled:
            return
        self.is_settled = True
        for chunk in self._chunks if not self._is_alone else []:
            if not chunk.ddp_config.overlap_param_gather:  # else the forward pre-hooks gather
                chunk.start_param_sync()

    def leave(self) -> None:
        """Settle, and let DDP start what is left of the gathers where it is needed."""
        self.settle()
        if self._gathers is not None:
            self._gathers.leave()

    def _after_forward(self, *_unused: Any) -> None:
        if self._must_zero:
            self._engine.wait_until_reusable()
            self.is_settled = True
            self._zero_grads()

    def _zero_grads(self) -> None:
        self._must_zero = False
        for chunk in self._chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                buffer.reset()

    def _param_ready(self, number: int) -> None:
        for i in self._subgroups_of[number]:
            self._missing[i] -= 1
            if self._missing[i] == 0:
                self._engine.grads_ready(i)

    def _shards_reduced(self, shards: Sequence[int], work: Any) -> None:
        """The gradients of these shards are final when the collective has ended, but for late parameters."""
        engine = self._engine
        with engine.following(work):
            for s in reversed(engine.layout.subgroups):
                if s.shard in shards and s.index not in engine.late_subgroups:
                    engine.grads_ready(s.index)

    def _count_missing(self) -> None:
        """Parameters of each subgroup whose gradient is not final yet."""
        self._missing = [0] * len(self._engine.layout.subgroups)
        for subgroups in self._subgroups_of:
            for i in subgroups:
                self._missing[i] += 1
