"""The `simulate` command: a run on machines that are not at hand, and all that it assumes. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from deep_offload.cli_plan import costs, layout_of, nothing_fits, table, with_room
from deep_offload.cli_request import request_from
from deep_offload.config import OffloadConfig
from deep_offload.model.cost import op_seconds
from deep_offload.model.dry_run import Forecast, StageForecast, dry_run_report, forecast, milliseconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import PROCESS_HOST_BYTES, SAVE_HOST_BYTES, format_bytes
from deep_offload.model.planning import try_forecast
from deep_offload.model.simulator import Simulation, settled_iteration, simulate
from deep_offload.plan.draw import draw_lanes
from deep_offload.plan.planner import build_plan

SHARES = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0)
"""GPU shares of the table beside the chosen one."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Changes to the machine, beside the flags of `plan`."""
    add = parser.add_argument
    add("--scale-link", type=float, default=1.0, help="host to GPU and back, times this: 2 makes PCIe 6 of PCIe 5")
    add("--scale-dram", type=float, default=1.0, help="host memory and the CPU update, which lives by it, times this")
    add("--scale-gpu", type=float, default=1.0, help="the GPU's arithmetic and its own update, times this")
    add("--network-gb-per-s", type=float, help="bytes of a collective between hosts per second and GPU, in GB/s")
    add("--width", type=int, default=100, help="characters of a drawn lane")


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor`, here because its own module needs torch."""
    add = parser.add_argument
    add("--json", action="store_true", help="print facts and findings as JSON instead of lines")
    add("--use-cpu", action="store_true", help="leave GPUs out")
    add("--disk", type=Path, default=Path("."), help="folder whose write speed counts: that of --save")
    add("--no-profile", action="store_true", help="do not measure and write the hardware profile")


def changed_profile(arguments: argparse.Namespace, profile: HardwareProfile) -> HardwareProfile:
    """The machine with the scales of the command line. Raises ValueError for scales that no machine has."""
    scales = {
        ("h2d_", "d2h_"): arguments.scale_link,
        ("dram_", "host_dram_", "cpu_adam_"): arguments.scale_dram,
        ("gpu_",): arguments.scale_gpu,
    }
    for flag in ("scale_link", "scale_dram", "scale_gpu"):
        value = getattr(arguments, flag)
        if not 0.01 <= value <= 100:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}, allowed are numbers from 0.01 to 100")
    values: dict[str, float] = {}
    for starts, scale in scales.items():
        for name in HardwareProfile.__dataclass_fields__:
            if name.startswith(starts) and name.endswith("_per_s"):
                values[name] = getattr(profile, name) * scale
    if arguments.network_gb_per_s is not None:
        if not arguments.network_gb_per_s > 0:
            raise ValueError(f"--network-gb-per-s is {arguments.network_gb_per_s}, it must be more than 0")
        values["network_bytes_per_s"] = arguments.network_gb_per_s * 1e9
    words = [f"{name} x {scale:g}" for name, scale in _scales(arguments) if scale != 1]
    if values.get("network_bytes_per_s", profile.network_bytes_per_s) != profile.network_bytes_per_s:
        words.append(f"network {arguments.network_gb_per_s:g} GB/s a GPU")
    if not words:
        return profile
    source = f"{profile.source}; changed on paper: {', '.join(words)}"
    return replace(profile, source=source, is_estimate=True, **values)  # type: ignore[arg-type]


def _scales(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    yield "link", arguments.scale_link
    yield "host memory", arguments.scale_dram
    yield "GPU", arguments.scale_gpu


def answer(arguments: argparse.Namespace, config: OffloadConfig, profile: HardwareProfile) -> tuple[list[str], bool]:
    """Lines to print, and whether the run fits."""
    if arguments.width < 10:
        raise ValueError(f"--width is {arguments.width}, it must be at least 10")
    if arguments.largest:
        raise ValueError("--largest is a question for `plan`: ask it first, then simulate a model of those layers")
    given, profile = profile, changed_profile(arguments, profile)
    is_changed = profile != given
    request = request_from(arguments, config, profile)
    run = layout_of(request)
    if run is None:
        return [*request.notes, nothing_fits()], False
    request, note = with_room(run, request)
    config = request.config
    report = dry_run_report(run, config, profile)
    lines = [*request.notes, *note, *report.lines]
    if not report.fits:
        return [*lines, "", *assumptions(profile, None, is_changed=is_changed)], False
    result = forecast(run, config, profile)
    played = _play(result, result.slowest)
    lines += ["", "one update and the iteration around it, on the slowest rank:"]
    lines += draw_lanes(played.timeline, arguments.width).splitlines()
    if request.show_alternatives:
        lines += ["", *_share_table(result, config)]
    lines += costs(result, request.tokens)
    return [*lines, "", *assumptions(profile, result, is_changed=is_changed)], True


def _play(result: Forecast, stage: StageForecast) -> Simulation:
    """An iteration of the chosen placement, with the run's compute around it."""
    choice, compute = stage.choice, result.compute
    seconds = op_seconds(stage.layout, choice.state, result.profile)
    plan = build_plan(stage.layout, choice.placement, max(1, choice.num_slots), seconds)
    play = partial(
        simulate,
        plan,
        stage.layout,
        choice.state,
        result.profile,
        forward_seconds=compute.forward,
        backward_seconds=compute.backward,
        other_seconds=max(0.0, compute.iteration - compute.forward - compute.backward),
        num_ranks=result.ranks_per_host,
    )
    return settled_iteration(play)


def _share_table(result: Forecast, config: OffloadConfig) -> list[str]:
    rows = [("GPU share", "slots", "update", "iteration", "bound by")]
    for share in SHARES:
        changed = replace(config, offload_gpu_share=share, offload_stride="auto")
        found = try_forecast(f"{share:g}", result.run, changed, result.profile)
        if found.result is None or found.problems:
            rows.append((found.name, "-", "-", "-", "does not fit"))
            continue
        slowest = found.result.slowest
        choice = slowest.choice
        update = f"{milliseconds(choice.predicted_update_seconds)} ms"
        iteration = f"{milliseconds(slowest.iteration_seconds)} ms"
        rows.append((found.name, str(choice.num_slots), update, iteration, choice.binding_lane))
    return table(rows)


def assumptions(profile: HardwareProfile, result: Forecast | None, *, is_changed: bool) -> list[str]:
    """What the answer rests on, so that a reader can disagree with it. is_changed: the machine exists on paper only."""
    if is_changed:
        rates = f"rates are those of no real machine, but made from {profile.name}: {profile.source}"
    else:
        rates = f"rates of {profile.name}: {profile.source}"
        rates += "; estimates, not measurements" if profile.is_estimate else ""
    ranks = max(1, profile.num_gpus) if result is None else result.ranks_per_host
    dram = profile.rank_dram_bytes_per_s(ranks) / 1e9
    lines = [
        "assumptions:",
        f"  {rates}",
        f"  link {profile.h2d_bytes_per_s / 1e9:.0f} GB/s up and {profile.d2h_bytes_per_s / 1e9:.0f} down, "
        f"{profile.h2d_both_bytes_per_s / 1e9:.0f} and {profile.d2h_both_bytes_per_s / 1e9:.0f} at once; host memory "
        f"{dram:.0f} GB/s a rank with {ranks} rank(s) of a host at work",
        f"  CPU update {profile.cpu_adam_param_params_per_s / 1e9:.2f} G parameters/s a rank alone, "
        f"{profile.cpu_adam_param_busy_params_per_s / 1e9:.2f} beside copies; GPU update "
        f"{profile.gpu_adam_params_per_s / 1e9:.0f}",
        f"  a save takes {format_bytes(SAVE_HOST_BYTES)} of host memory beside a rank's state; the "
        f"{format_bytes(PROCESS_HOST_BYTES)} of its process are no part of the host memory in a profile",
        f"  training reaches {profile.gpu_flops_per_s / 1e12:.0f} TFLOP/s a GPU whatever the layer sizes; "
        "tensor-parallel communication inside layers costs nothing",
        "  all hosts and ranks are alike; data loading, evaluations, checkpoints and failures cost nothing",
    ]
    if result is not None and result.run.parallel.data > 1:
        inside = result.run.parallel.world_size <= ranks
        rate = profile.collective_bytes_per_s if inside else profile.network_bytes_per_s
        known = f"{rate / 1e9:.0f} GB/s a GPU" if rate else "unknown, so communication counts nothing"
        lines.append(f"  collectives {'inside a host' if inside else 'between hosts'}: {known}")
    return lines
