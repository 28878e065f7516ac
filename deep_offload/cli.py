"""`python -m deep_offload plan | simulate | doctor | calibrate | show-plan | report | explain`.

Only `doctor` and `calibrate` import torch, only `report` matplotlib.

Exit code 0: done, and the planned run fits. 2: wrong arguments, it does not fit, or a launch script holds surprises.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from deep_offload import cli_plan, cli_request, cli_simulate
from deep_offload.config import OffloadConfig
from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.hardware import HardwareProfile, profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file, planning_profile
from deep_offload.model.simulator import settled_iteration, simulate
from deep_offload.model.this_machine import cpu_update_threads
from deep_offload.plan.check import check_plan
from deep_offload.plan.draw import draw_lanes, trace_to_json
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Placement
from deep_offload.plan.placement import place_by_share, place_by_stride
from deep_offload.plan.planner import build_plan
from deep_offload.plan.timeline import Timeline


class _Parser(argparse.ArgumentParser):
    """Names the nearest flag when one is unknown."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            flag = message[len(prefix) :].split()[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(flag, known, 1)
            message = f"{flag} is unknown" + (f", did you mean {near[0]}?" if near else "") + " (--help lists all)"
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        arguments.parser.error("unrecognized arguments: " + " ".join(rest))
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"{arguments.parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m deep_offload", description="Plan runs, measure this machine, look at plans.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    plan = commands.add_parser("plan", help="bytes and times of a run before it starts, and its alternatives")
    cli_request.add_plan_flags(plan)
    _add_offload_flags(plan)
    plan.set_defaults(run=_plan, parser=plan)
    calibrate = commands.add_parser("calibrate", help="measure this machine and keep its profile")
    calibrate.add_argument("--threads", type=int, help="threads of the CPU update; not given: as training chooses")
    calibrate.add_argument("--output", type=Path, help="also write the profile to this file")
    calibrate.add_argument("--use-cpu", action="store_true", help="measure the CPU as the device despite a GPU")
    calibrate.set_defaults(run=_calibrate, parser=calibrate)
    show = commands.add_parser("show-plan", help="the operations of one update, drawn as a simulation plays them")
    _add_show_flags(show)
    show.set_defaults(run=_show_plan, parser=show)
    simulate_command = commands.add_parser("simulate", help="a run on paper, on machines that do not exist yet too")
    cli_request.add_plan_flags(simulate_command)
    _add_offload_flags(simulate_command)
    cli_simulate.add_flags(simulate_command)
    simulate_command.set_defaults(run=_simulate, parser=simulate_command)
    doctor = commands.add_parser("doctor", help="what of this machine will cost speed, and what to do about it")
    cli_simulate.add_doctor_flags(doctor)
    doctor.set_defaults(run=_doctor, parser=doctor)
    report = commands.add_parser("report", help="one HTML file about a run that wrote --run-dir")
    report.add_argument("run_dir", type=Path, help="the directory that the run wrote")
    report.add_argument("--output", type=Path, help="the file to write; not given: RUN_DIR/report.html")
    report.set_defaults(run=_report, parser=report)
    explain = commands.add_parser("explain", help="what becomes of each flag of a Megatron launch script")
    explain.add_argument("script", help="bash script, read and never run, or a YAML file with flags as keys")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script would get as $1 and so on")
    explain.set_defaults(run=_explain, parser=explain)
    return parser


def _simulate(arguments: argparse.Namespace) -> int:
    profile, note = planning_profile(arguments.profile)
    lines, fits = cli_simulate.answer(arguments, offload_config(arguments), profile)
    _print([note, *lines])
    return 0 if fits else 2


def _doctor(arguments: argparse.Namespace) -> int:
    from deep_offload.doctor import main as doctor  # heavy: torch

    return doctor(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from deep_offload.report import write_report  # heavy: matplotlib

    path = write_report(arguments.run_dir, arguments.output or arguments.run_dir / "report.html")
    print(f"report: {path}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    # Here, because the engine's other commands must work without the training layer.
    from megatron.training.explain import main as explain

    return explain([arguments.script, *arguments.arguments], program=arguments.parser.prog)


def _add_offload_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, with the meaning that pretrain_gpt.py gives them."""
    add = parser.add_argument
    share = "part (0..1) of the offloaded subgroups that the GPU updates; auto: found here"
    add("--offload-gpu-share", type=_auto(float), default="auto", help=share)
    stride = "every K-th offloaded subgroup on the GPU instead of a share; none: all on the CPU"
    add("--offload-stride", type=_auto(int, "none"), default="auto", help=stride)
    resident = "part (0..1) of the subgroups whose state stays on the GPU; auto: all that fits"
    add("--offload-resident-fraction", type=_auto(float), default="auto", help=resident)
    numel = "about so many elements in a subgroup; auto: 2**26, fewer in small shards"
    add("--offload-subgroup-numel", type=_auto(int), default="auto", help=numel)
    add("--offload-num-slots", type=_auto(int), default="auto", help="staging slots on the GPU; auto: 4 or 8")
    add("--offload-grad-wire", default="auto", help="type of gradients on the way to the host: auto, fp32, param")
    add("--offload-split-master", default="auto", help="low halves of bf16 masters alone are moved: auto, on, off")
    add("--offload-device-budget-gib", type=float, help="GPU memory for state; not given: what training leaves")
    add("--offload-host-budget-gib", type=float, help="host memory of a rank for state; not given: what the host has")


def _auto(kind: type, *words: str):  # noqa: ANN202 - argparse wants a callable with a name
    def parse(text: str) -> object:
        return text if text in ("auto", *words) else kind(text)

    parse.__name__ = f"{kind.__name__} or auto"
    return parse


def offload_config(arguments: argparse.Namespace) -> OffloadConfig:
    """The settings that the command line gives. Raises ValueError for nonsense."""
    names = [name for name in vars(arguments) if name.startswith("offload_")]
    return OffloadConfig(interleaved_offload=True, **{name: getattr(arguments, name) for name in names})


def _plan(arguments: argparse.Namespace) -> int:
    profile, note = planning_profile(arguments.profile)
    request = cli_request.request_from(arguments, offload_config(arguments), profile)
    lines, fits = cli_plan.answer(request)
    _print([note, *lines])
    return 0 if fits else 2


def _print(lines: Sequence[str]) -> None:
    """Print an answer; a reader who has seen enough, such as `head`, is no fault."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Or the interpreter complains at its end, when it flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _calibrate(arguments: argparse.Namespace) -> int:
    import torch  # heavy, and this command alone needs it

    from deep_offload.runtime.limits import read_host_limits
    from deep_offload.runtime.measure import fingerprint, profile_for_run

    use_gpu = torch.cuda.is_available() and not arguments.use_cpu
    device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    threads = arguments.threads
    if threads is None:
        threads = cpu_update_threads(read_host_limits().cores, 1, use_gpu)
    elif threads < 1:
        raise ValueError(f"--threads is {threads}, it must be at least 1")
    if arguments.output is not None:
        _check_writable("--output", arguments.output)
    profile = profile_for_run(None, device, threads, remeasure=True, log=print)
    text = profile_to_json(profile)
    print(text, end="")
    if arguments.output is not None:
        _write_file("--output", arguments.output, text)
    print(f"training on this machine finds it in {cache_file(fingerprint(device, threads))}")
    return 0


def _check_writable(flag: str, path: Path) -> None:
    """Raises ValueError for a file that cannot be written, before time goes into what it is to hold."""
    is_new = not os.path.lexists(path)
    _write_file(flag, path, "", mode="a")
    if is_new:
        path.unlink()


def _write_file(flag: str, path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror}): give another file") from error


def _add_show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--subgroups", type=int, default=16)
    add("--subgroup-numel", type=int, default=1 << 26, help="elements of each subgroup")
    add("--gpu-share", type=float, default=0.5)
    add("--stride", type=int, help="every K-th subgroup on the GPU, instead of --gpu-share")
    add("--resident-fraction", type=float, default=0.0)
    add("--slots", type=int, default=4)
    add("--split-master", action="store_true", help="10 bytes a streamed parameter each way instead of 12")
    add("--fp32-gradients", action="store_true", help="fp32 gradient buffer instead of a 16-bit one")
    add("--forward-ms", type=float, default=0.0, help="compute of the forward pass")
    add("--backward-ms", type=float, default=100.0, help="compute of the backward pass")
    add("--profile", help=f"a JSON file or one of {', '.join(BUILT_IN_PROFILES)}")
    add("--ops", action="store_true", help="print every operation with what it waits for")
    add("--trace", type=Path, help="write a Chrome/Perfetto trace to this file")
    add("--width", type=int, default=100, help="characters of a lane")


def _show_plan(arguments: argparse.Namespace) -> int:
    _check_show_flags(arguments)
    profile, note = planning_profile(arguments.profile)
    state = StateFormat(arguments.split_master, "fp32" if arguments.fp32_gradients else "param")
    shard = ShardSpec(arguments.subgroups * arguments.subgroup_numel, 2, 4 if arguments.fp32_gradients else 2)
    layout = build_layout([shard], arguments.subgroup_numel)
    placement = _shown_placement(arguments, len(layout.subgroups))
    plan = build_plan(layout, placement, arguments.slots, op_seconds(layout, state, profile))
    check_plan(plan)
    compute = {"forward_seconds": arguments.forward_ms / 1e3, "backward_seconds": arguments.backward_ms / 1e3}
    played = settled_iteration(partial(simulate, plan, layout, state, profile, **compute))
    if arguments.ops:
        print(plan)
    print(note)
    print(draw_lanes(played.timeline, arguments.width))
    print("\n".join(_shown_times(played.timeline, layout.numel, played.iteration_seconds, profile)))
    if arguments.trace is not None:
        _write_file("--trace", arguments.trace, trace_to_json({"simulated": played.timeline}))
        print(f"trace: {arguments.trace}")
    return 0


def _check_show_flags(arguments: argparse.Namespace) -> None:
    if arguments.subgroups < 1 or arguments.subgroup_numel < 1 or arguments.width < 10:
        raise ValueError("--subgroups and --subgroup-numel must be at least 1, and --width at least 10")
    for flag, value in (("--gpu-share", arguments.gpu_share), ("--resident-fraction", arguments.resident_fraction)):
        if not 0 <= value <= 1:
            raise ValueError(f"{flag} is {value}, allowed are numbers from 0 to 1")
    for flag, value in (("--stride", arguments.stride), ("--slots", arguments.slots)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}, allowed are whole numbers from 1")
    for flag, value in (("--forward-ms", arguments.forward_ms), ("--backward-ms", arguments.backward_ms)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{flag} is {value}, it must be a finite number, 0 or more")


def _shown_placement(arguments: argparse.Namespace, num_subgroups: int) -> Placement:
    if arguments.stride is None:
        return place_by_share(num_subgroups, arguments.gpu_share, arguments.resident_fraction)
    return place_by_stride(num_subgroups, arguments.stride, arguments.resident_fraction)


def _shown_times(timeline: Timeline, numel: int, iteration_seconds: float, profile: HardwareProfile) -> list[str]:
    """Times in the words of the training log; numel: of all parameters."""
    seconds = timeline.in_place_seconds
    rate = numel / seconds / 1e9 if seconds > 0 else 0.0
    lines = [
        f"update {1e3 * seconds:.1f} ms ({1e3 * timeline.update_seconds:.1f} with the last flush), {rate:.2f} G "
        f"parameters/s, iteration {1e3 * iteration_seconds:.1f} ms"
    ]
    if profile.num_gpus > 1:
        lines.append(
            f"one rank alone: with {profile.num_gpus} at work, one for each GPU of {profile.name}, each has "
            f"{profile.rank_dram_bytes_per_s(profile.num_gpus) / 1e9:.0f} instead of "
            f"{profile.rank_dram_bytes_per_s(1) / 1e9:.0f} GB/s of host memory"
        )
    return lines
