"""One training run as plain numbers: what it keeps in GPU memory besides optimizer state, and how long it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from deep_offload.model.buckets import RankBuffers, rank_buffers
from deep_offload.model.gpt import GPTShape, ParallelShape, chunk_params
from deep_offload.model.hardware import HardwareProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeShape:
    """What the backward pass computes again, in Megatron's words (`--recompute-granularity` and so on)."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    is_distributed: bool = False
    """Saved inputs of recomputed layers are split over the tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """Everything about a run that its bytes and seconds follow from.

    param_bytes, grad_bytes: of one element of the parameters and of the gradient buffer. is_bf16: parameters are bf16,
    so that masters may be split. bucket_size: elements of a DDP bucket, None for DDP's own choice. is_fused: the
    activation function is one compiled kernel (on GPUs with a compiler).
    """

    model: GPTShape
    parallel: ParallelShape
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    param_bytes: int = 2
    grad_bytes: int = 4
    is_bf16: bool = True
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    recompute: RecomputeShape = field(default_factory=RecomputeShape)
    has_hidden_dropout: bool = False
    has_rope: bool = True
    is_fused: bool = True

    def __post_init__(self) -> None:
        for name in ("seq_length", "micro_batch_size", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be at least 1")
        step = self.micro_batch_size * self.parallel.data
        if self.global_batch_size % step:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} times {self.parallel.data} data-parallel ranks: change one of them"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in one iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.parallel.data)

    def buffers(self, pipeline_rank: int = 0) -> RankBuffers:
        """DDP's buffers on a rank of this pipeline stage."""
        return rank_buffers(
            self.model,
            self.parallel,
            pipeline_rank,
            overlap_grad_reduce=self.overlap_grad_reduce,
            bucket_size=self.bucket_size,
        )


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """GPU bytes of one rank besides optimizer state, at the peak of an iteration.

    activations: saved for the backward pass by all micro-batches in flight, with those that a layer computes again.
    recomputed: the latter. head: logits and their gradient, which are gone before a layer computes anything again.
    working: the largest tensors of a single layer's backward pass.
    """

    weights: int
    gradients: int
    activations: int
    recomputed: int
    head: int
    working: int

    @property
    def largest(self) -> int:
        """Bytes beside `activations` when most are taken: by the logits, in place of what is computed again, or by a
        layer."""
        return max(self.head - self.recomputed, self.working)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.largest


@lru_cache(maxsize=64)  # every strategy on the same run asks for all stages again
def model_bytes(run: RunShape, pipeline_rank: int = 0) -> ModelBytes:
    """Estimate a rank's GPU bytes. Weights and gradients are exact; the rest follows what the local layers save."""
    numel = run.buffers(pipeline_rank).numel
    parallel, recompute = run.parallel, run.recompute
    stages = range(parallel.virtual)
    layers = [parallel.num_layers(run.model.num_layers, pipeline_rank, stage) for stage in stages]
    full = layer_bytes(run)
    per_chunk = [_chunk_bytes(run, num, full) for num in layers]
    in_flight = _chunks_in_flight(run, pipeline_rank)
    again = 0
    if recompute.granularity == "full":
        again = full * min(max(layers), recompute.num_layers if recompute.method == "uniform" else 1)
    largest = max(
        (p.numel for stage in stages for p in chunk_params(run.model, parallel, pipeline_rank, stage)), default=0
    )
    is_last = pipeline_rank == parallel.pipeline - 1
    return ModelBytes(
        weights=numel * run.param_bytes,
        gradients=numel * run.grad_bytes,
        activations=round(in_flight * max(per_chunk)) + again,
        recomputed=again,
        head=_head_bytes(run) if is_last else 0,
        working=largest * run.param_bytes + _tokens(run) * 2 * run.model.ffn_hidden_size * run.param_bytes,
    )


def least_model_bytes(run: RunShape) -> tuple[int, int]:
    """At least the bytes of weights and of gradients on the fullest stage, in closed form whatever the model's size.

    The mean over tensor- and pipeline-parallel ranks of the matrices alone.
    """
    numel = run.model.matmul_params // (run.parallel.tensor * run.parallel.pipeline)
    return numel * run.param_bytes, numel * run.grad_bytes


def _tokens(run: RunShape) -> int:
    return run.seq_length * run.micro_batch_size


def layer_bytes(run: RunShape) -> int:
    """Bytes that one layer saves for the backward pass of one micro-batch, counted from the local layers' tensors.

    Norms keep input and output; attention the projected q, k, v, the rotated q and k, the output and a sum per row; a
    gated MLP its first product and the input of the second, and unless fused the activation and a shifted factor. The
    unfused rotation keeps four tables of its own per layer.
    """
    shape, parallel = run.model, run.parallel
    width, tensor = run.param_bytes, parallel.tensor
    queries = shape.num_attention_heads * shape.kv_channels
    keys = shape.num_query_groups * shape.kv_channels
    modules = run.recompute.modules if run.recompute.granularity == "selective" else ()
    outside = (2 if "layernorm" in modules else 4) * shape.hidden_size * width
    outside += 2 * 4 * (2 if shape.normalization == "LayerNorm" else 1)  # fp32 statistics of two norms
    if run.has_hidden_dropout:
        outside += 2 * shape.hidden_size  # one byte of mask for each of two dropouts
    attention = (queries + 2 * keys + queries) * width  # q, k, v as projected, and the output
    if run.has_rope:
        attention += (queries + keys) * width
    elif shape.num_query_groups != shape.num_attention_heads:
        attention += queries * width  # queries of one group lie apart: they are copied together
    if "core_attn" not in modules:
        attention += 4 * shape.num_attention_heads
    gated = 3 if run.is_fused else 5
    mlp = 0 if "mlp" in modules else (gated if shape.swiglu else 2) * shape.ffn_hidden_size * width
    split = outside // tensor if parallel.sequence_parallel else outside
    tables = 4 * run.seq_length * shape.kv_channels * width if run.has_rope else 0
    return _tokens(run) * (split + (attention + mlp) // tensor) + tables


def _chunk_bytes(run: RunShape, num_layers: int, full: int) -> int:
    """Bytes that one chunk of layers saves for one micro-batch."""
    recompute, hidden = run.recompute, run.model.hidden_size * run.param_bytes
    if recompute.granularity != "full":
        return num_layers * full
    is_split = recompute.is_distributed or run.parallel.sequence_parallel
    saved_input = _tokens(run) * hidden // (run.parallel.tensor if is_split else 1)
    if recompute.method == "block":
        again = min(num_layers, recompute.num_layers)
        return again * saved_input + (num_layers - again) * full
    return -(-num_layers // recompute.num_layers) * saved_input


def _chunks_in_flight(run: RunShape, pipeline_rank: int) -> int:
    """Chunks of micro-batches whose activations a rank holds at once, at most."""
    pipeline, virtual = run.parallel.pipeline, run.parallel.virtual
    if virtual == 1:
        return min(pipeline - pipeline_rank, run.num_micro_batches)
    warm_up = 2 * (pipeline - pipeline_rank - 1) + (virtual - 1) * pipeline + 1
    return min(warm_up, run.num_micro_batches * virtual)


def _head_bytes(run: RunShape) -> int:
    """Final norm, and logits in the parameters' type beside their fp32 copy, which becomes the softmax in place; or
    later the logits' gradient beside that of their weights."""
    norm = 2 * run.model.hidden_size * run.param_bytes
    vocab = run.model.padded_vocab_size // run.parallel.tensor
    logits = _tokens(run) * vocab * run.param_bytes
    return _tokens(run) * norm + logits + max(_tokens(run) * vocab * 4, vocab * run.model.hidden_size * run.param_bytes)


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """Seconds of one micro-batch's passes, of the whole iteration's compute, and of its communication.

    bubble: idle share of the pipeline added to the iteration; communication: reductions and gathers that nothing
    hides, None when the profile does not know the network.
    """

    forward: float
    backward: float
    num_micro_batches: int
    bubble: float
    communication: float | None

    @property
    def iteration(self) -> float:
        """Compute, bubble and communication of one iteration, without the update."""
        passes = self.num_micro_batches * (self.forward + self.backward)
        return passes * (1 + self.bubble) + (self.communication or 0.0)


def compute_seconds(run: RunShape, profile: HardwareProfile, ranks_per_host: int | None = None) -> ComputeSeconds:
    """Predict a rank's compute from the profile's matrix rate; recomputation repeats the forward pass or parts of it.

    ranks_per_host: None for one per GPU.
    """
    parallel, tokens = run.parallel, _tokens(run)
    ranks = parallel.tensor * parallel.pipeline
    forward = run.model.training_flops(tokens, run.seq_length) / ranks / 3 / profile.gpu_flops_per_s
    backward = 2 * forward
    if run.recompute.granularity == "full":
        share = 1.0
        if run.recompute.method == "block":  # so many layers of every chunk
            share = min(1.0, run.recompute.num_layers * parallel.pipeline * parallel.virtual / run.model.num_layers)
        backward += share * forward
    elif run.recompute.granularity == "selective":
        again = run.model.repeated_flops(run.recompute.modules, tokens, run.seq_length)
        backward += again / ranks / profile.gpu_flops_per_s
    bubble = (parallel.pipeline - 1) / (run.num_micro_batches * parallel.virtual)
    per_host = max(1, profile.num_gpus) if ranks_per_host is None else ranks_per_host
    communication = _communication(run, profile, backward, is_inside=parallel.world_size <= per_host)
    return ComputeSeconds(forward, backward, run.num_micro_batches, bubble, communication)


def _communication(run: RunShape, profile: HardwareProfile, backward: float, *, is_inside: bool) -> float | None:
    """Seconds of the gradients' reduce-scatter and the parameters' all-gather that the backward pass does not hide.

    is_inside: all ranks are on one host.
    """
    data = run.parallel.data
    if data == 1:
        return 0.0
    rate = profile.collective_bytes_per_s if is_inside else profile.network_bytes_per_s
    if rate == 0:
        return None
    numel = run.buffers(0).numel * (data - 1) / data
    reduce = numel * run.grad_bytes / rate
    return max(0.0, reduce - backward if run.overlap_grad_reduce else reduce) + numel * run.param_bytes / rate
