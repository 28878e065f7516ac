"""A run on paper: placement, bytes and predicted times of every pipeline stage, as lines. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import Choice, Compute
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import PROCESS_HOST_BYTES, SAVE_HOST_BYTES, format_bytes
from deep_offload.model.performance import method_stride, round_stride
from deep_offload.model.residency import GPU_MEMORY_SHARE, choose_with_residents, state_budget_bytes, working_bytes
from deep_offload.model.run import (
    ComputeSeconds,
    ModelBytes,
    RecomputeShape,
    RunShape,
    compute_seconds,
    least_model_bytes,
    model_bytes,
)
from deep_offload.plan.layout import ShardLayout, auto_subgroup_numel, build_layout
from deep_offload.plan.ops import Place

_LARGEST_GPU_BYTES = 1 << 40
"""More than any GPU has: what a model is held against where the profile knows no GPU."""

_LARGE_BUBBLE = 0.5
"""Pipeline bubble beside compute from which a dry run warns."""

_LESS_GPU_MEMORY = "recompute activations, use more tensor- or pipeline-parallel ranks, or a smaller micro-batch"


@dataclass(frozen=True, slots=True)
class StageForecast:
    """What one rank of a pipeline stage needs and how long it takes.

    iteration_seconds: from norm to norm in the steady state; exposed_seconds: what the update adds to compute.
    """

    pipeline_rank: int
    layout: ShardLayout
    choice: Choice
    model: ModelBytes
    iteration_seconds: float
    exposed_seconds: float

    @property
    def gpu_bytes(self) -> int:
        return self.model.total + self.choice.device_bytes.total

    @property
    def host_bytes(self) -> int:
        """Of optimizer state."""
        return self.choice.host_bytes.total

    @property
    def total_host_bytes(self) -> int:
        """Of optimizer state and of a save: what is held against the profile's host memory."""
        return self.host_bytes + SAVE_HOST_BYTES


@dataclass(frozen=True, slots=True)
class Forecast:
    """All stages of a run, with so many ranks on each host.

    problems: one sentence each for what does not fit, empty if the run fits.
    """

    run: RunShape
    profile: HardwareProfile
    ranks_per_host: int
    compute: ComputeSeconds
    stages: tuple[StageForecast, ...]
    problems: tuple[str, ...]

    @property
    def slowest(self) -> StageForecast:
        return max(self.stages, key=lambda stage: stage.iteration_seconds)

    @property
    def iteration_seconds(self) -> float:
        return self.slowest.iteration_seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU; 0 where nothing takes time."""
        tokens = self.run.global_batch_size * self.run.seq_length
        seconds = self.iteration_seconds * self.run.parallel.world_size
        return tokens / seconds if seconds else 0.0

    @property
    def is_offloaded(self) -> bool:
        """Whether any stage keeps state in host memory."""
        return any(place is not Place.RESIDENT for stage in self.stages for place in stage.choice.placement)


def ranks_per_host(world_size: int, profile: HardwareProfile, local_ranks: int | None = None) -> int:
    """Ranks that share one host: one per GPU, or as many as were started; fewer where hosts could not all have as many.

    local_ranks: started on this host, if known. 1 says nothing where the profile has GPUs: so many has a dry run that
    no launcher started.
    """
    if local_ranks is not None and profile.num_gpus == 0:
        return min(world_size, local_ranks)
    if local_ranks is not None and local_ranks > 1 and world_size % local_ranks == 0:
        return local_ranks
    num_gpus = max(1, profile.num_gpus)
    return next(count for count in range(min(world_size, num_gpus), 0, -1) if world_size % count == 0)


def host_share_bytes(profile: HardwareProfile, ranks: int) -> int:
    """Host memory of each of `ranks` ranks on a host; 0 where the profile does not know it."""
    return profile.host_memory_bytes // ranks


def forecast(
    run: RunShape, config: OffloadConfig, profile: HardwareProfile, local_ranks: int | None = None
) -> Forecast:
    """Choose and simulate every pipeline stage. local_ranks: as `ranks_per_host` takes it.

    Raises ValueError when a choice itself cannot be made, or weights and gradients alone are more than a GPU has.
    """
    problem = weights_problem(run, profile)
    if problem is not None:
        raise ValueError(problem)
    return _forecast(run, config, profile, ranks_per_host(run.parallel.world_size, profile, local_ranks))


@lru_cache(maxsize=16)  # a report, its costs and its table of strategies ask for the same one
def _forecast(run: RunShape, config: OffloadConfig, profile: HardwareProfile, ranks: int) -> Forecast:
    compute = compute_seconds(run, profile, ranks)
    stages = tuple(_stage(run, config, profile, ranks, compute, rank) for rank in range(run.parallel.pipeline))
    problems = (*_gpu_problems(stages, profile), *_host_problems(stages, host_share_bytes(profile, ranks)))
    return Forecast(run, profile, ranks, compute, stages, problems)


def weights_problem(run: RunShape, profile: HardwareProfile) -> str | None:
    """A sentence where a GPU cannot even hold a rank's weights and gradients. Costs nothing at any model size."""
    least = sum(least_model_bytes(run))
    if least <= (usable_gpu_bytes(profile) or _LARGEST_GPU_BYTES):
        return None
    if profile.gpu_memory_bytes:
        limit = f"{format_bytes(usable_gpu_bytes(profile))} of a single {profile.name} GPU are usable"
    else:
        limit = f"no GPU has {format_bytes(_LARGEST_GPU_BYTES)}"
    return (
        f"weights and gradients of a rank alone need {format_bytes(least)} of GPU memory, but {limit}: use more "
        "tensor- or pipeline-parallel ranks, or a smaller model"
    )


def usable_gpu_bytes(profile: HardwareProfile) -> int:
    """Bytes of a GPU that a run may plan with; 0 where there is none."""
    return int(GPU_MEMORY_SHARE * profile.gpu_memory_bytes)


def _stage(
    run: RunShape,
    config: OffloadConfig,
    profile: HardwareProfile,
    ranks: int,
    compute: ComputeSeconds,
    pipeline_rank: int,
) -> StageForecast:
    shards = run.buffers(pipeline_rank).shards(run.param_bytes, run.grad_bytes)
    wanted = config.offload_subgroup_numel
    numel = auto_subgroup_numel(sum(s.numel for s in shards)) if wanted == "auto" else wanted
    layout = build_layout(shards, numel)
    model = model_bytes(run, pipeline_rank)
    total = profile.gpu_memory_bytes
    left = state_budget_bytes(total - model.weights - model.gradients, total, working_bytes(model))
    choice = choose_with_residents(
        layout,
        config,
        profile,
        left,
        device_budget_bytes=budget_bytes(config.offload_device_budget_gib),
        spare_device_bytes=left if total else None,
        host_limit_bytes=_host_state_limit(config, host_share_bytes(profile, ranks)),
        can_split=run.is_bf16,
        num_ranks=ranks,
        may_move=True,
        compute=Compute.of(compute),
    )
    iteration = choice.predicted_iteration_seconds
    return StageForecast(pipeline_rank, layout, choice, model, iteration, max(0.0, iteration - compute.iteration))


def budget_bytes(gib: float | None) -> int | None:
    """Bytes of a budget flag."""
    return None if gib is None else int(gib * 2**30)


def _host_state_limit(config: OffloadConfig, share: int) -> int | None:
    """Bytes of state that a rank may keep on the host: the budget, or its share less a save; None: unknown."""
    budget = budget_bytes(config.offload_host_budget_gib)
    if not share:
        return budget
    left = max(0, share - SAVE_HOST_BYTES)
    return left if budget is None else min(budget, left)


def _gpu_problems(stages: tuple[StageForecast, ...], profile: HardwareProfile) -> tuple[str, ...]:
    fullest, usable = max(stages, key=lambda stage: stage.gpu_bytes), usable_gpu_bytes(profile)
    if profile.gpu_memory_bytes == 0 or fullest.gpu_bytes <= usable:
        return ()
    advice = _LESS_GPU_MEMORY
    if fullest.gpu_bytes - fullest.choice.device_bytes.slots <= usable:
        advice = "update all on the CPU, without slots (--offload-gpu-share 0), or " + advice
    elif fullest.choice.device_bytes.resident:
        advice = "lower --offload-resident-fraction or add --interleaved-offload, or " + advice
    return (
        f"a rank of pipeline stage {fullest.pipeline_rank} needs {format_bytes(fullest.gpu_bytes)} of GPU memory, but "
        f"{format_bytes(usable)} of a single {profile.name} GPU are usable: {advice}",
    )


def _host_problems(stages: tuple[StageForecast, ...], share: int) -> tuple[str, ...]:
    """The choice kept state within the limit: what may be left is a save that has no room at all."""
    need = max(stage.total_host_bytes for stage in stages)
    if share == 0 or need <= share:
        return ()
    return (
        f"a rank needs {format_bytes(need)} of host memory, {format_bytes(SAVE_HOST_BYTES)} of it for a save, "
        f"but this rank has {format_bytes(share)}: use hosts with more memory, or fewer ranks on each",
    )


def unknown_limits(profile: HardwareProfile) -> str:
    """Which memory the profile does not know, for people; empty where it knows both."""
    kinds = (("GPU memory", profile.gpu_memory_bytes), ("host memory", profile.host_memory_bytes))
    return " and ".join(name for name, size in kinds if size == 0)


class DryRun(NamedTuple):
    """What `--dry-run` prints, and whether the run fits (exit code 0, else 2)."""

    lines: list[str]
    fits: bool


def dry_run_report(
    run: RunShape, config: OffloadConfig, profile: HardwareProfile, local_ranks: int | None = None
) -> DryRun:
    """Describe a run before anything is allocated: bytes, placement and predicted times of every pipeline stage.

    local_ranks: as `ranks_per_host` takes it.
    """
    ranks = ranks_per_host(run.parallel.world_size, profile, local_ranks)
    lines = _describe_run(run, profile, ranks)
    try:
        result = forecast(run, config, profile, local_ranks)
    except ValueError as error:
        return DryRun([*lines, *_known_before(run, profile, ranks), f"does not fit: {error}"], False)
    for stage in result.stages:
        lines += describe_stage(stage, result)
    if result.is_offloaded:
        lines.append(_describe_method(profile))
    lines += [_describe_recomputation(run), *_describe_time(result)]
    lines += [f"does not fit: {problem}" for problem in result.problems] or [_verdict(profile)]
    return DryRun(lines, not result.problems)


def _verdict(profile: HardwareProfile) -> str:
    unknown = unknown_limits(profile)
    if not unknown:
        return "fits"
    known = {"GPU memory": "host memory fits; ", "host memory": "GPU memory fits; "}.get(unknown, "")
    return f"{known}not checked: {unknown}, which hardware profile {profile.name} does not know"


def _known_before(run: RunShape, profile: HardwareProfile, ranks: int) -> list[str]:
    """Bytes that no placement changes, where none was found."""
    weights, gradients = least_model_bytes(run)
    lines = [f"GPU bytes of a rank: at least weights {format_bytes(weights)} and gradients {format_bytes(gradients)}"]
    if profile.gpu_memory_bytes:
        lines[0] += f" of {format_bytes(usable_gpu_bytes(profile))}"
    if profile.host_memory_bytes:
        share = format_bytes(host_share_bytes(profile, ranks))
        lines.append(f"host bytes for a rank: {share}, {format_bytes(SAVE_HOST_BYTES)} of them for a save")
    return lines


def _describe_run(run: RunShape, profile: HardwareProfile, ranks: int) -> list[str]:
    p = run.parallel
    virtual = f" x {p.virtual} virtual" if p.virtual > 1 else ""
    estimate = "; an ESTIMATE, expect large errors" if profile.is_estimate else ""
    count = run.model.num_params
    size = f"{count / 1e9:.2f} B" if count >= 1e7 else f"{count / 1e6:.2f} M"
    return [
        f"model: {size} parameters, {run.model.num_layers} layers, sequence "
        f"{run.seq_length}, micro-batch {run.micro_batch_size}, global batch {run.global_batch_size}",
        _describe_kind(run),
        f"ranks: {p.world_size} = tensor {p.tensor} x pipeline {p.pipeline}{virtual} x data {p.data}, {ranks} per host",
        f"hardware: {profile.name}, {profile.source} ({profile.date}){estimate}",
    ]


def _describe_kind(run: RunShape) -> str:
    """What the bytes and seconds take the model and its types to be."""
    model = run.model
    positions = (
        "rope" if run.has_rope else f"{model.positions} learned positions" if model.positions else "no positions"
    )
    types = "fp32" if run.param_bytes == 4 else "bf16" if run.is_bf16 else "fp16"
    gradients = "fp32" if run.grad_bytes == 4 else types
    return (
        f"taken to be: {'SwiGLU' if model.swiglu else 'no gated MLP'} of width {model.ffn_hidden_size}, "
        f"{model.normalization}, {'biases' if model.add_bias_linear else 'no biases'}, {positions}, "
        f"{'tied' if model.tie_embeddings else 'untied'} embeddings of {model.padded_vocab_size} rows, {types} "
        f"parameters, {gradients} gradient buffer, {'' if run.has_hidden_dropout else 'no '}dropout"
    )


def describe_stage(stage: StageForecast, result: Forecast) -> list[str]:
    """Lines about one rank of a pipeline stage: subgroups, placement, GPU and host bytes by kind."""
    choice, model, profile = stage.choice, stage.model, result.profile
    where = f"stage {stage.pipeline_rank}: " if len(result.stages) > 1 else ""
    device, host = choice.device_bytes, choice.host_bytes
    # A profile of a machine without a GPU knows no limits.
    gpu_limit = f" of {format_bytes(usable_gpu_bytes(profile))}" if profile.gpu_memory_bytes else " (limit unknown)"
    per_rank = host_share_bytes(profile, result.ranks_per_host)
    host_limit = f"of {format_bytes(per_rank)}" if per_rank else "(limit unknown)"
    return [
        where + describe_choice(choice, stage.layout),
        f"{where}GPU bytes of a rank: {format_bytes(stage.gpu_bytes)}{gpu_limit} = weights "
        f"{format_bytes(model.weights)}, gradients {format_bytes(model.gradients)}, activations "
        f"{format_bytes(model.activations)}, logits or a layer's largest tensors {format_bytes(model.largest)}, "
        f"resident state {format_bytes(device.resident)}, slots {format_bytes(device.slots)}, upcast "
        f"{format_bytes(device.upcast)}",
        f"{where}host bytes of a rank: {format_bytes(host.total)} of state = master "
        f"{format_bytes(host.master)}, exp_avg {format_bytes(host.exp_avg)}, exp_avg_sq "
        f"{format_bytes(host.exp_avg_sq)}, gradients {format_bytes(host.grad)}, outgoing weights "
        f"{format_bytes(host.weight)}, page rounding {format_bytes(host.rounding)}, reserve for a lower GPU share "
        f"{format_bytes(host.reserve)}; with {format_bytes(SAVE_HOST_BYTES)} for a save "
        f"{format_bytes(stage.total_host_bytes)} {host_limit}, and {format_bytes(PROCESS_HOST_BYTES)} of its process "
        "beside that limit",
    ]


def describe_choice(choice: Choice, layout: ShardLayout) -> str:
    """One line: how many subgroups are where, share, stride, wire, master, and why."""
    counts = {place: sum(p is place for p in choice.placement) for place in Place}
    stride = "none" if choice.stride is None else str(choice.stride)
    return (
        f"{len(choice.placement)} subgroups of at most {layout.max_subgroup_numel} elements: {counts[Place.CPU]} on "
        f"the CPU, {counts[Place.GPU]} streamed, {counts[Place.RESIDENT]} resident; GPU share {choice.gpu_share:.2f} "
        f"(stride {stride}), resident fraction {choice.resident_fraction:.2f}, gradient wire {choice.wire}, "
        f"{'split' if choice.split_master else 'full'} master, "
        f"{choice.num_slots} slots ({choice.why})"
    )


def _describe_method(profile: HardwareProfile) -> str:
    """What the publication would choose, to compare the chosen share and stride with."""
    stride = method_stride(profile)
    if stride is None:
        found = "no stride, the CPU always wins"
    else:
        found = f"stride k = {stride:.2f}, rounded up to {round_stride(stride)}"
    return f"the method's own formula (host memory not counted): {found}"


def milliseconds(seconds: float) -> str:
    """Milliseconds for people: whole ones from 100 on, below with three significant digits."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _describe_time(result: Forecast) -> list[str]:
    slowest, compute = result.slowest, result.compute
    choice = slowest.choice
    rate = slowest.layout.numel / choice.predicted_update_seconds / 1e9 if choice.predicted_update_seconds else 0.0
    unknown = ", communication unknown and not counted" if compute.communication is None else ""
    lines = [
        f"predicted update: {milliseconds(choice.predicted_update_seconds)} ms, {rate:.2f} G parameters/s a rank, "
        f"bound by {choice.binding_lane} (busy: "
        + ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in choice.lane_shares.items())
        + ")",
        f"predicted iteration: {milliseconds(result.iteration_seconds)} ms = {compute.num_micro_batches} x (forward "
        f"{milliseconds(compute.forward)} + backward {milliseconds(compute.backward)}), bubble "
        f"{100 * compute.bubble:.0f} %, communication {milliseconds(compute.communication or 0.0)}, exposed update "
        f"{milliseconds(slowest.exposed_seconds)}{unknown}; bound by {_binder(result)}; "
        f"{result.tokens_per_s_per_gpu:.0f} tokens/s/GPU",
    ]
    if compute.bubble > _LARGE_BUBBLE:
        lines.append(
            f"warning: the pipeline's bubble adds {100 * compute.bubble:.0f} % to the compute: raise "
            "--global-batch-size for more micro-batches, or lower --pipeline-model-parallel-size"
        )
    return lines


def _binder(result: Forecast) -> str:
    """What takes the largest part of the iteration."""
    compute, slowest = result.compute, result.slowest
    passes = compute.num_micro_batches * (compute.forward + compute.backward)
    parts = {
        "compute": passes,
        "the pipeline's bubble": compute.bubble * passes,
        "communication": compute.communication or 0.0,
        f"the update ({slowest.choice.binding_lane})": slowest.exposed_seconds,
    }
    return max(parts, key=lambda name: parts[name])


def _describe_recomputation(run: RunShape) -> str:
    """Activations of the first stage, which holds the most of them, however they are recomputed."""
    modes = (
        ("none", RecomputeShape()),
        ("selective", RecomputeShape(granularity="selective")),
        ("full", RecomputeShape(granularity="full", method="uniform")),
    )
    sizes = [f"{name} {format_bytes(model_bytes(replace(run, recompute=mode)).activations)}" for name, mode in modes]
    return f"activations of a rank by recomputation: {', '.join(sizes)}"
