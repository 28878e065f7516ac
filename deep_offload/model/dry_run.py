"""A run on paper: placement, bytes and predicted times of every pipeline stage, as lines. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import Choice, Compute
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import format_bytes
from deep_offload.model.residency import GPU_MEMORY_SHARE, choose_with_residents, state_budget_bytes, working_bytes
from deep_offload.model.run import ComputeSeconds, ModelBytes, RunShape, compute_seconds, model_bytes
from deep_offload.plan.layout import ShardLayout, auto_subgroup_numel, build_layout
from deep_offload.plan.ops import Place


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
        return self.choice.host_bytes.total


@dataclass(frozen=True, slots=True)
class Forecast:
    """All stages of a run; problems: one sentence each for what does not fit, empty if the run fits."""

    run: RunShape
    profile: HardwareProfile
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
    def ranks_per_host(self) -> int:
        return ranks_per_host(self.run, self.profile)


def ranks_per_host(run: RunShape, profile: HardwareProfile) -> int:
    """Ranks that share one host: one per GPU."""
    return min(run.parallel.world_size, max(1, profile.num_gpus))


@lru_cache(maxsize=16)  # a report, its costs and its table of strategies ask for the same one
def forecast(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> Forecast:
    """Choose and simulate every pipeline stage. Raises ValueError when a choice itself cannot be made."""
    compute = compute_seconds(run, profile)
    stages = tuple(_stage(run, config, profile, compute, rank) for rank in range(run.parallel.pipeline))
    return Forecast(run, profile, compute, stages, _problems(stages, run, profile))


def _stage(
    run: RunShape, config: OffloadConfig, profile: HardwareProfile, compute: ComputeSeconds, pipeline_rank: int
) -> StageForecast:
    shards = run.buffers(pipeline_rank).shards(run.param_bytes, run.grad_bytes)
    wanted = config.offload_subgroup_numel
    numel = auto_subgroup_numel(sum(s.numel for s in shards)) if wanted == "auto" else wanted
    layout = build_layout(shards, numel)
    ranks = ranks_per_host(run, profile)
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
        host_limit_bytes=budget_bytes(config.offload_host_budget_gib) or (profile.host_memory_bytes // ranks or None),
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


def _problems(stages: tuple[StageForecast, ...], run: RunShape, profile: HardwareProfile) -> tuple[str, ...]:
    if profile.gpu_memory_bytes == 0:
        return ()
    fullest = max(stages, key=lambda stage: stage.gpu_bytes)
    usable = int(GPU_MEMORY_SHARE * profile.gpu_memory_bytes)
    if fullest.gpu_bytes <= usable:
        return ()
    advice = "recompute activations, use more tensor- or pipeline-parallel ranks, or a smaller micro-batch"
    if fullest.choice.device_bytes.resident:
        advice = "lower --offload-resident-fraction or add --interleaved-offload, or " + advice
    return (
        f"a rank of pipeline stage {fullest.pipeline_rank} needs {format_bytes(fullest.gpu_bytes)} of GPU memory, but "
        f"{format_bytes(usable)} of a {profile.name} GPU are usable: {advice}",
    )


class DryRun(NamedTuple):
    """What `--dry-run` prints, and whether the run fits (exit code 0, else 2)."""

    lines: list[str]
    fits: bool


def dry_run_report(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> DryRun:
    """Describe a run before anything is allocated: bytes, placement and predicted times of every pipeline stage."""
    lines = _describe_run(run, profile)
    try:
        result = forecast(run, config, profile)
    except ValueError as error:
        return DryRun([*lines, f"does not fit: {error}"], False)
    for stage in result.stages:
        lines += describe_stage(stage, result)
    lines += _describe_time(result)
    lines += [f"does not fit: {problem}" for problem in result.problems] or ["fits"]
    return DryRun(lines, not result.problems)


def _describe_run(run: RunShape, profile: HardwareProfile) -> list[str]:
    p = run.parallel
    virtual = f" x {p.virtual} virtual" if p.virtual > 1 else ""
    estimate = "; an ESTIMATE, expect large errors" if profile.is_estimate else ""
    count = run.model.num_params
    size = f"{count / 1e9:.2f} B" if count >= 1e7 else f"{count / 1e6:.2f} M"
    return [
        f"model: {size} parameters, {run.model.num_layers} layers, sequence "
        f"{run.seq_length}, micro-batch {run.micro_batch_size}, global batch {run.global_batch_size}",
        f"ranks: {p.world_size} = tensor {p.tensor} x pipeline {p.pipeline}{virtual} x data {p.data}, "
        f"{ranks_per_host(run, profile)} per host",
        f"hardware: {profile.name}, {profile.source} ({profile.date}){estimate}",
    ]


def describe_stage(stage: StageForecast, result: Forecast) -> list[str]:
    """Lines about one rank of a pipeline stage: subgroups, placement, GPU and host bytes by kind."""
    choice, model, profile = stage.choice, stage.model, result.profile
    where = f"stage {stage.pipeline_rank}: " if len(result.stages) > 1 else ""
    device, host = choice.device_bytes, choice.host_bytes
    # A profile of a machine without a GPU knows no limits.
    gpu_limit = f" of {format_bytes(GPU_MEMORY_SHARE * profile.gpu_memory_bytes)}" if profile.gpu_memory_bytes else ""
    per_rank = profile.host_memory_bytes // result.ranks_per_host
    host_limit = f" of {format_bytes(per_rank)}" if per_rank else ""
    return [
        where + describe_choice(choice, stage.layout),
        f"{where}GPU bytes of a rank: {format_bytes(stage.gpu_bytes)}{gpu_limit} = weights "
        f"{format_bytes(model.weights)}, gradients {format_bytes(model.gradients)}, activations "
        f"{format_bytes(model.activations)}, logits {format_bytes(model.head)}, working {format_bytes(model.working)}, "
        f"resident state {format_bytes(device.resident)}, slots {format_bytes(device.slots)}, upcast "
        f"{format_bytes(device.upcast)}",
        f"{where}host bytes of a rank: {format_bytes(host.total)}{host_limit} = master "
        f"{format_bytes(host.master)}, exp_avg {format_bytes(host.exp_avg)}, exp_avg_sq "
        f"{format_bytes(host.exp_avg_sq)}, gradients {format_bytes(host.grad)}, outgoing weights "
        f"{format_bytes(host.weight)}, page rounding {format_bytes(host.rounding)}, reserve for a lower GPU share "
        f"{format_bytes(host.reserve)}",
    ]


def describe_choice(choice: Choice, layout: ShardLayout) -> str:
    """One line: how many subgroups are where, share, stride, wire, master, and why."""
    counts = {place: sum(p is place for p in choice.placement) for place in Place}
    stride = "none" if choice.stride is None else str(choice.stride)
    return (
        f"{len(choice.placement)} subgroups of at most {layout.max_subgroup_numel} elements: {counts[Place.CPU]} on "
        f"the CPU, {counts[Place.GPU]} streamed, {counts[Place.RESIDENT]} resident; GPU share {choice.gpu_share:.2f} "
        f"(stride {stride}), gradient wire {choice.wire}, {'split' if choice.split_master else 'full'} master, "
        f"{choice.num_slots} slots ({choice.why})"
    )


def _describe_time(result: Forecast) -> list[str]:
    slowest, compute = result.slowest, result.compute
    choice = slowest.choice
    rate = slowest.layout.numel / choice.predicted_update_seconds / 1e9 if choice.predicted_update_seconds else 0.0
    tokens = result.run.global_batch_size * result.run.seq_length
    per_gpu = tokens / result.iteration_seconds / result.run.parallel.world_size if result.iteration_seconds else 0.0
    unknown = ", communication unknown and not counted" if compute.communication is None else ""
    return [
        f"predicted update: {1e3 * choice.predicted_update_seconds:.0f} ms, {rate:.2f} G parameters/s a rank, bound by "
        f"{choice.binding_lane} (busy: "
        + ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in choice.lane_shares.items())
        + ")",
        f"predicted iteration: {1e3 * result.iteration_seconds:.0f} ms = {compute.num_micro_batches} x (forward "
        f"{1e3 * compute.forward:.0f} + backward {1e3 * compute.backward:.0f}), bubble {100 * compute.bubble:.0f} %, "
        f"communication {1e3 * (compute.communication or 0):.0f}, exposed update "
        f"{1e3 * slowest.exposed_seconds:.0f}{unknown}; {per_gpu:.0f} tokens/s/GPU",
    ]
