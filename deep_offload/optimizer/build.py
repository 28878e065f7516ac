"""From settings to an engine: limits, profile, placement, and the lines that tell the user about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from deep_offload.config import OffloadConfig
from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.model.choose import Choice, Compute
from deep_offload.model.cost import op_seconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import load_profile
from deep_offload.model.residency import choose_with_residents, is_automatic, state_budget_bytes
from deep_offload.model.run import RunShape, compute_seconds
from deep_offload.model.this_machine import cpu_update_threads
from deep_offload.model.trace import Expectation
from deep_offload.optimizer.engine import EngineSettings, OffloadEngine
from deep_offload.optimizer.residency import memory_reader, placement_line, start_with_room
from deep_offload.optimizer.shards import Shard
from deep_offload.plan.layout import ShardLayout, auto_subgroup_numel, build_layout
from deep_offload.runtime.limits import HostLimits, ranks_on_this_node, read_host_limits
from deep_offload.runtime.measure import ALONE, Together, profile_for_run

GIB = 1 << 30


def build_engine(
    shards: Sequence[Shard],
    config: OffloadConfig,
    *,
    warn: Callable[[str], None],
    log: Callable[[str], None],
    late_params: Collection[int] = (),
    cores: float | None = None,
    ranks: int | None = None,
    together: Together = ALONE,
    estimated_bytes: int | None = None,
    run: RunShape | None = None,
    may_move: bool = False,
) -> tuple[OffloadEngine, list[str]]:
    """Choose a placement that fits, then allocate and start the engine; also returns lines that describe it.

    shards in forward order; late_params: as `OffloadEngine` takes them; cores: this rank's share of the node's, None
    for an equal part of those that this process may use; ranks: those of this node, None for what the launcher says;
    together: how all ranks measure at once; estimated_bytes: GPU bytes that training takes beside weights, gradients
    and state, None where nobody knows: then nothing is resident unless a fraction or a budget is given; run: what is
    trained, for its compute; may_move: a `PlacementFollower` may change the share, for which host memory is reserved.
    Raises ValueError, with numbers, before any large allocation if it does not fit.
    """
    cpu_kernels.selected_isa()  # a missing extension or a wrong DEEP_OFFLOAD_ISA ends here, before anything is measured
    device = shards[0].param.device if shards else torch.device("cpu")
    layout = _layout(shards, config)
    ranks, limits = ranks or ranks_on_this_node(), read_host_limits()
    cores = limits.cores / ranks if cores is None else cores
    num_threads = _num_threads(config, cores, device)
    profile = _profile(config, device, num_threads, ranks, together, log)
    given = layout, config, profile
    compute = None if run is None else Compute.of(compute_seconds(run, profile, ranks))
    budget = _state_budget(device, estimated_bytes)
    choose = partial(
        choose_with_residents,
        *given,
        device_budget_bytes=_device_budget(config, device),
        spare_device_bytes=budget,
        host_limit_bytes=_host_limit(config, limits, ranks),
        can_split=any(s.param.dtype == torch.bfloat16 for s in shards),
        num_ranks=ranks,
        may_move=may_move,
        compute=compute,
    )

    def start(choice: Choice) -> OffloadEngine:
        settings, seconds = _settings(choice, shards, num_threads), op_seconds(layout, choice.state, profile)
        return OffloadEngine(
            shards, layout, settings, warn=warn, log=log, seconds=seconds, device=device, late_params=late_params
        )

    choice = choose(budget or 0)
    engine, choice = start_with_room(choice, choose, start, log) if is_automatic(config) else (start(choice), choice)
    if config.interleaved_offload:
        rest = profile, ranks, choice.predicted_update_seconds, choice.binding_lane, compute
        engine.expected = Expectation(engine.plan, layout, choice.state, *rest)
    lines = _describe(engine, layout, choice, profile, config, limits)
    if config.interleaved_offload and cores < 1:
        lines.append(_few_cores(cores, choice.predicted_update_seconds))
    return engine, lines


def _num_threads(config: OffloadConfig, cores: float, device: torch.device) -> int:
    given = config.offload_cpu_threads
    return cpu_update_threads(max(1, int(cores)), 1, device.type == "cuda") if given == "auto" else given


def _layout(shards: Sequence[Shard], config: OffloadConfig) -> ShardLayout:
    specs = [shard.spec for shard in shards]
    numel = config.offload_subgroup_numel
    return build_layout(specs, auto_subgroup_numel(sum(s.numel for s in specs)) if numel == "auto" else numel)


def _settings(choice: Choice, shards: Sequence[Shard], num_threads: int) -> EngineSettings:
    grad_dtypes = {s.grad.dtype for s in shards if s.grad.dtype.itemsize == 2}
    return EngineSettings(
        placement=choice.placement,
        num_slots=max(1, choice.num_slots),
        split_master=choice.split_master,
        wire_dtype=torch.float32 if choice.wire == "fp32" or not grad_dtypes else next(iter(grad_dtypes)),
        num_threads=num_threads,
        reserved=choice.reserved,
    )


def _profile(
    config: OffloadConfig,
    device: torch.device,
    num_threads: int,
    ranks: int,
    together: Together,
    log: Callable[[str], None],
) -> HardwareProfile:
    """The given profile, or this machine's measured rates; without offload nothing depends on them."""
    if not config.interleaved_offload:
        return load_profile("h200")
    profile = profile_for_run(config.offload_profile, device, num_threads, ranks, together=together, log=log)
    if device.type == "cuda":  # what measuring took must not show in the run's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return profile


def _state_budget(device: torch.device, estimated_bytes: int | None) -> int | None:
    """GPU bytes for state where nobody says how many; 0: the estimate leaves none; None: no GPU or no estimate."""
    read = memory_reader(device)
    if read is None or estimated_bytes is None:
        return None
    memory = read()
    return state_budget_bytes(memory.available, memory.total, estimated_bytes)


def _device_budget(config: OffloadConfig, device: torch.device) -> int | None:
    if config.offload_device_budget_gib is not None:
        return int(config.offload_device_budget_gib * GIB)
    if device.type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return free


def _host_limit(config: OffloadConfig, limits: HostLimits, ranks: int) -> int | None:
    """Bytes this rank may pin: its share of what the machine still gives, or the budget, whichever is less."""
    share = None if limits.available_bytes is None else limits.available_bytes // ranks
    if config.offload_host_budget_gib is None:
        return share
    budget = int(config.offload_host_budget_gib * GIB)
    return budget if share is None else min(budget, share)


def _few_cores(cores: float, seconds: float) -> str:
    """The rates were measured with all ranks at work, so that the prediction holds the price."""
    return (
        f"warning: {cores:.2g} cores per rank: ranks take turns on a core, so an update is predicted to take "
        f"{seconds * 1e3:.1f} ms, about {seconds * cores * 1e3:.1f} ms with a core for each: start fewer ranks on this "
        "node or let them use more cores"
    )


def _describe(
    engine: OffloadEngine,
    layout: ShardLayout,
    choice: Choice,
    profile: HardwareProfile,
    config: OffloadConfig,
    limits: HostLimits,
) -> list[str]:
    reserve = choice.host_bytes.reserve
    reserved = f", {reserve / GIB:.3f} GiB of it reserved for a lower GPU share" if reserve else ""
    lines = [
        placement_line(layout, choice.placement),
        f"bytes: {engine.host_bytes / GIB:.3f} GiB of host memory (limit: {limits.source}{reserved}), "
        f"{engine.device_bytes / GIB:.3f} GiB of device memory ({choice.device_bytes.slots / GIB:.3f} GiB of it "
        f"staging slots)",
    ]
    if config.interleaved_offload:
        lines += [
            f"placement: GPU share {choice.gpu_share:.3f}, stride {choice.stride or 'none'}, resident fraction "
            f"{choice.resident_fraction:.3f}, {engine.settings.num_slots} slots, gradient wire {choice.wire}, "
            f"split master "
            f"{'on' if engine.settings.split_master else 'off'}, {engine.settings.num_threads} CPU threads "
            f"({choice.why})",
            f"rates, and those with all lanes at work: {_rates(profile, choice)}",
            f"predicted update: {choice.predicted_update_seconds * 1e3:.1f} ms, bound by {choice.binding_lane}; "
            f"rates of "
            f"{profile.name} ({profile.source}, {profile.date})",
        ]
    return lines


def _rates(profile: HardwareProfile, choice: Choice) -> str:
    """The measured rates that an update depends on most."""
    cpu = [getattr(profile, f"cpu_adam_{choice.wire}_{busy}params_per_s") / 1e9 for busy in ("", "busy_")]
    up = profile.h2d_bytes_per_s / 1e9, profile.h2d_busy_bytes_per_s / 1e9
    down = profile.d2h_bytes_per_s / 1e9, profile.d2h_busy_bytes_per_s / 1e9
    memory = profile.dram_bytes_per_s / 1e9, profile.host_dram_bytes_per_s / 1e9
    return (
        f"CPU update {cpu[0]:.2f} / {cpu[1]:.2f} G parameters/s, to the device {up[0]:.1f} / {up[1]:.1f} GB/s, from it "
        f"{down[0]:.1f} / {down[1]:.1f} GB/s; host memory {memory[0]:.0f} GB/s, {memory[1]:.0f} GB/s for all ranks"
    )
