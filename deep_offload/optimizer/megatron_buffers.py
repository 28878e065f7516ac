"""The only code that reads the insides of megatron-core's DistributedDataParallel.

Attributes read: DDP.{buffers, expert_parallel_buffers, bucket_groups, expert_parallel_bucket_groups, ddp_config,
config, params_with_grad}; buffer.{buckets, param_index_map, data_parallel_group}; bucket.{param_data, grad_data,
offset, params_list, numel_unpadded, gradient_scaling_factor}; bucket_group.{buckets, is_last_microbatch,
grad_reduce_handle}.
`tests/optimizer/test_megatron_contract.py` names each, so that a new megatron-core breaks one file with one message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from deep_offload.optimizer.shards import Segment, Shard


@dataclass(frozen=True, slots=True)
class ParamPiece:
    """Part of a parameter in this rank's slice: elements [param_start, param_start + numel) of the flat parameter
    are elements [shard_start, ...) of shard number `shard`."""

    shard: int
    shard_start: int
    param_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Bucket number `index` of buffer number `buffer`, counted over all chunks; the slice begins at element `start`.

    dtypes: of parameters and gradients; numel: of the whole bucket without the padding at its end.
    """

    buffer: int
    index: int
    start: int
    numel: int
    dtypes: tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, slots=True)
class BucketShard:
    """This data-parallel rank's slice of one bucket, with what is needed to reduce, gather and name it."""

    shard: Shard
    bucket_group: Any
    chunk_index: int
    group: torch.distributed.ProcessGroup
    """The data-parallel group whose ranks own the other slices."""
    bucket: BucketPlace
    """Where the slice lies in DDP's buffers."""


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
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    buffer_numbers = {id(buffer): number for number, buffer in enumerate(buffers)}
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
        place = BucketPlace(
            buffer_numbers[id(buffer)],
            [id(b) for b in buffer.buckets].index(id(bucket)),
            low - bucket.offset,
            bucket.numel_unpadded,
            (bucket.param_data.dtype, bucket.grad_data.dtype),
        )
        shards.append(BucketShard(shard, group, chunk_index, process_group, place))
    return BufferMap(tuple(shards), tuple(params), tuple(tuple(p) for p in pieces))


def _buckets_in_forward_order(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[int, Any, Any, Any]]:
    """(chunk index, bucket group, bucket, buffer); DDP lays buckets out in backward order."""
    for chunk_index, chunk in enumerate(chunks):
        owner = {id(b): buffer for buffer in chunk.buffers + chunk.expert_parallel_buffers for b in buffer.buckets}
        for group in reversed(chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                yield chunk_index, group, bucket, owner[id(bucket)]


def late_params(chunks: Sequence[DistributedDataParallel], buffers: BufferMap) -> frozenset[int]:
    """Numbers of the parameters whose gradient `finalize_model_grads` may change after the data-parallel reduction.

    All with per-token scaling; copies of tied embeddings on other pipeline stages; what tensor-parallel ranks sum up.
    """
    config = chunks[0].config
    if config.calculate_per_token_loss:
        return frozenset(range(len(buffers.params)))
    number_of, late = buffers.number_of(), set()
    for chunk in chunks:
        model = unwrap_model(chunk)
        if config.pipeline_model_parallel_size > 1:
            late |= {p for n, p in model.named_parameters() if n.endswith(_ON_SEVERAL_STAGES)}
            if model.share_embeddings_and_output_weights:
                late.add(model.shared_embedding_or_output_weight())
        if config.tensor_model_parallel_size > 1:
            late |= {p for n, p in model.named_parameters() if _is_summed_over_tensor_ranks(config, n, p)}
    return frozenset(number_of[p] for p in late if p in number_of)


_ON_SEVERAL_STAGES = ("position_embeddings.weight",)


def _is_summed_over_tensor_ranks(config: Any, name: str, param: torch.nn.Parameter) -> bool:
    return (
        getattr(param, "average_gradients_across_tp_domain", False)
        or (config.sequence_parallel and getattr(param, "sequence_parallel", False))
        or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
    )


def watch_backward(
    chunks: Sequence[DistributedDataParallel],
    buffers: BufferMap,
    late: frozenset[int],
    *,
    on_param: Callable[[int], None],
    on_shards: Callable[[Sequence[int], Any], None],
    on_again: Callable[[int], None],
) -> BackwardHooks | ReductionHooks | None:
    """Find out during the last micro-batch's backward which gradients are final; None where none is before its end.

    With one data-parallel rank: on_param(number), a gradient that is not late is final; on_again(number), it was not.
    With several: on_shards(numbers, work), the gradients of these shards are final when `work` has ended, but
    for the late ones among them.
    """
    if len(late) == len(buffers.params) or not buffers.shards:
        return None
    if all(b.group.size() == 1 for b in buffers.shards):
        scaled = any(b.gradient_scaling_factor != 1.0 for c in chunks for g in c.bucket_groups for b in g.buckets)
        return None if scaled else BackwardHooks(buffers, late, on_param, on_again)
    if not chunks[0].ddp_config.overlap_grad_reduce:
        return None
    return ReductionHooks(buffers, on_shards)


class BackwardHooks:
    """Calls `on_ready(number)` when the gradient of parameter `number` is final in the last micro-batch's backward.

    The hooks run behind DDP's own, which add the gradient to the buffer. How often a parameter's hook fires in one
    backward is learned from the first one, as DDP does it; `on_again(number)` is called if a gradient changes after
    it was
    said to be final.
    """

    def __init__(
        self,
        buffers: BufferMap,
        late: frozenset[int],
        on_ready: Callable[[int], None],
        on_again: Callable[[int], None],
    ) -> None:
        self._on_ready = on_ready
        self._on_again = on_again
        self._expected: dict[int, int] | None = None
        self._seen: dict[int, int] = {}
        groups = {s.param: b.bucket_group for b in buffers.shards for s in b.shard.segments}
        hooks = {n: self._hook(n, group) for n, group in groups.items() if n not in late}
        self._accumulators = [_hook_accumulation(buffers.params[n], hook) for n, hook in hooks.items()]

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


class ReductionHooks:
    """Calls `on_dispatched(shard numbers, work)` when a bucket group's reduce-scatter has been started in backward.

    DDP starts it in the hook of the group's last gradient; ours run behind DDP's. In the first iteration DDP learns how
    often each gradient arrives, and reduces after backward: then nothing is called.
    """

    def __init__(self, buffers: BufferMap, on_dispatched: Callable[[Sequence[int], Any], None]) -> None:
        self._on_dispatched = on_dispatched
        self._reported: set[int] = set()
        shards: dict[int, list[int]] = {}
        groups: dict[int, Any] = {}
        for number, bucket in enumerate(buffers.shards):
            shards.setdefault(id(bucket.bucket_group), []).append(number)
            groups[id(bucket.bucket_group)] = bucket.bucket_group
        self._accumulators = [
            _hook_accumulation(param, self._hook(groups[key], numbers))
            for key, numbers in shards.items()
            for bucket in groups[key].buckets
            for param in bucket.params_list
        ]

    def _hook(self, bucket_group: Any, shards: Sequence[int]) -> Callable[..., None]:
        def hook(*_unused: Any) -> None:
            work = bucket_group.grad_reduce_handle
            if work is not None and id(bucket_group) not in self._reported:
                self._reported.add(id(bucket_group))
                if not bucket_group.buckets[0].grad_data.is_cuda:
                    work = bucket_group.grad_reduce_handle = _WaitOnce(work)
                self._on_dispatched(shards, work)

        return hook

    def end_of_backward(self) -> None:
        """The iteration's gradients are complete."""
        self._reported.clear()


def reset_counts(chunk: DistributedDataParallel) -> None:
    """What DDP's `zero_grad_buffer` does at the start of an iteration besides zeroing."""
    for param in chunk.params_with_grad:
        param.grad_added_to_main_grad = False
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        group.reset()


def wait_in_forward(
    chunks: Sequence[DistributedDataParallel],
    end_of: Mapping[torch.nn.Parameter, int],
    wait_for_params: Callable[[int], None],
) -> None:
    """With one data-parallel rank: make each module's forward pass wait until its own parameters are in place.

    So the first layers compute while the last ones are still being updated. end_of: number of subgroups, from the
    first, that must be in place before a parameter is read.
    """

    def hook_for(count: int) -> Callable[..., None]:
        return lambda *_unused: wait_for_params(count)

    for chunk in chunks:
        for group in chunk.bucket_groups:
            # With --overlap-param-gather DDP would gather from one rank: gloo reads a whole bucket and writes it
            # back later, over parameters that an update has put into place meanwhile.
            group.start_param_sync = _nothing_to_gather(group)
        for module in chunk.module.modules():
            count = max((end_of.get(p, 0) for p in module.parameters(recurse=False)), default=0)
            if count:
                module.register_forward_pre_hook(hook_for(count), prepend=True)


def _nothing_to_gather(bucket_group: Any) -> Callable[..., None]:
    """A bucket group's `start_param_sync` where one rank has all parameters."""

    def start_param_sync(force_sync: bool = False) -> None:
        bucket_group.param_gather_dispatched = True

    return start_param_sync


class ForwardGathers:
    """With --overlap-param-gather: all-gathers in forward order, each when its bucket group's shards are in place.

    A module's forward pass waits for its own group's gather; when it begins, the gather of the group behind it has been
    started. The order is the same on all ranks, whatever their speed.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        buffers: BufferMap,
        wait_for_shards: Callable[[int], None],
    ) -> None:
        """wait_for_shards(count): make the current stream wait until the first `count` shards are in place."""
        self._wait_for_shards = wait_for_shards
        self._groups: list[Any] = []
        self._num_shards: list[int] = []  # with those of the groups before
        for number, bucket in enumerate(buffers.shards, start=1):
            if not self._groups or self._groups[-1] is not bucket.bucket_group:
                self._groups.append(bucket.bucket_group)
                self._num_shards.append(number)
            self._num_shards[-1] = number
        self._next = len(self._groups)
        self._stream = None
        if buffers.shards and buffers.shards[0].shard.param.is_cuda:
            self._stream = torch.cuda.Stream(buffers.shards[0].shard.param.device)
        position = {p: i for i, group in enumerate(self._groups) for b in group.buckets for p in b.params_list}
        for chunk in chunks:
            chunk.overlap_param_gather_with_optimizer_step = True  # its hooks then start no group but the module's own
            for module in chunk.module.modules():
                last = max((position.get(p, -1) for p in module.parameters(recurse=False)), default=-1)
                if last >= 0:
                    module.register_forward_pre_hook(self._hook(last), prepend=True)

    def begin(self) -> None:
        """An update is with the lanes: start the first gather."""
        self._next = 0
        self._start_until(0)

    def leave(self) -> None:
        """All parameters are in place: DDP starts what is left where it is needed."""
        self._next = len(self._groups)

    def _hook(self, position: int) -> Callable[..., None]:
        def hook(*_unused: Any) -> None:
            self._start_until(position + 1)

        return hook

    def _start_until(self, position: int) -> None:
        while self._next <= position and self._next < len(self._groups):
            number, self._next = self._next, self._next + 1
            with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                self._wait_for_shards(self._num_shards[number])
                self._groups[number].start_param_sync()


class _WaitOnce:
    """A collective of gloo. Its every `wait` copies the result into place, which later would undo other changes."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None


def _hook_accumulation(param: torch.nn.Parameter, hook: Callable[..., None]) -> Any:
    """Call `hook` behind DDP's own when autograd has added to the gradient; keep the node that is returned alive."""
    node = param.expand_as(param).grad_fn.next_functions[0][0]
    node.register_hook(hook)
    return node
