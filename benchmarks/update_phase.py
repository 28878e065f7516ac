"""Rate of the update phase alone: synthetic gradients, real state, every lane at work.

    python -m benchmarks.update_phase --num-subgroups 16 --shares 0,0.5,1 [--splits off] [--resident 0.25]
    python -m benchmarks.update_phase --cover [--numel 33554432]     # a table of 28 settings
    torchrun --nproc_per_node 2 -m benchmarks.update_phase ...       # all ranks of a host at once

Prints one line per setting: median parameters/s of the update (from the norm until all parameters are in place), of a
steady loop (update after update, flushes included), the prediction, how near the update came to its bound, busy shares
of the lanes, and which part of the update the launching thread works itself. With several ranks, each has its own GPU
and its share of the cores; they start each timed update together, and rates are listed by rank.

--cover varies shares, strides, slots, threads, wires, residents and sizes, every share twice with the others between,
and ends with how far predictions were off and how near the chosen share came to the best one. A setting whose updates
contradict its rates (a busy lane by 10 %) corrects those that the next one with as many threads is predicted by.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from deep_offload.config import OffloadConfig
from deep_offload.kernels.scalars import AdamClass
from deep_offload.model.calibrate import corrected_profile, lanes_are_off
from deep_offload.model.choose import Compute
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.follow import LANE_TOLERANCE
from deep_offload.optimizer.ranks import all_ranks, from_all_ranks
from deep_offload.optimizer.shards import Segment, Shard
from deep_offload.plan.placement import gpu_share_of
from deep_offload.runtime.measure import keep_profile

ENDLESS_SECONDS = 10.0
"""A backward pass behind which all flushes and prefetches are done."""


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among those that measure together."""

    number: int
    world: int
    device: torch.device

    def together(self) -> None:
        """Wait for the others."""
        if self.world > 1:
            dist.barrier()

    def say(self, line: str) -> None:
        """Print on the first rank."""
        if self.number == 0:
            print(line, flush=True)


def join() -> Rank:
    """This process as torchrun started it, or alone."""
    has_gpu = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return Rank(0, 1, torch.device("cuda" if has_gpu else "cpu"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")  # nothing but barriers and a few numbers
    return Rank(dist.get_rank(), dist.get_world_size(), device)


def make_shards(num_subgroups: int, numel: int, device: torch.device) -> list[Shard]:
    """bf16 weights and gradients of `num_subgroups * numel` parameters in one shard, with random values."""
    total = num_subgroups * numel
    weight = torch.empty(total, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    grad = torch.empty(total, dtype=torch.bfloat16, device=device).normal_(0, 0.01)
    return [Shard(weight, grad, (Segment(0, total, 0),))]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds: `update` with gradients flushed before it, `steady` for one turn of a loop of updates (medians).

    main_thread: part of an update in which the thread that launches it does not sleep.
    """

    update: float
    steady: float
    main_thread: float


def measure(
    engine: OffloadEngine, repeats: int, device: torch.device, together: Callable[[], None] = lambda: None
) -> Measured:
    """Time updates. together: called before each timed part, for ranks that start at the same moment."""
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        engine.update([AdamClass(1e-4, 0.9, 0.95, 1e-8, 0.1, step)], [0], 0.9)

    singles, working = [], []
    for _ in range(repeats + 2):
        for i in reversed(range(len(engine.layout.subgroups))):
            engine.grads_ready(i)
        engine.synchronize()
        together()
        start, thread_start = time.perf_counter(), time.thread_time()
        update()
        engine.wait_until_reusable()
        thread_seconds = time.thread_time() - thread_start
        _synchronize(device)
        singles.append(time.perf_counter() - start)
        working.append(thread_seconds / singles[-1])
    engine.synchronize()
    together()
    start = time.perf_counter()
    for _ in range(repeats):
        update()
        engine.wait_until_reusable()
    engine.synchronize()
    steady = (time.perf_counter() - start) / repeats
    return Measured(statistics.median(singles[2:]), steady, statistics.median(working[2:]))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _auto_or(kind: type, word: str) -> Any:
    return word if word == "auto" else kind(word)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: what differs from the defaults of the flags of the same names. name: how its rows are called."""

    name: str
    num_subgroups: int
    numel: int
    share: str = "auto"
    stride: str = "auto"
    resident: float = 0.0
    wire: str = "param"
    split: str = "on"
    slots: str = "auto"
    threads: str = "auto"

    @property
    def config(self) -> OffloadConfig:
        """The same for the engine."""
        return OffloadConfig(
            interleaved_offload=True,
            offload_gpu_share=_auto_or(float, self.share),
            offload_stride=_auto_or(int, self.stride),
            offload_resident_fraction=self.resident,
            offload_subgroup_numel=self.numel,
            offload_num_slots=_auto_or(int, self.slots),
            offload_grad_wire=self.wire,
            offload_split_master=self.split,
            offload_cpu_threads=_auto_or(int, self.threads),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One setting's figures on this rank, seconds. bound: part of the update that its busiest lane needs, as text."""

    setting: Setting
    numel: int
    share: float
    measured: Measured
    predicted: float
    bound: str

    @property
    def error(self) -> float:
        """How far the prediction was off."""
        return self.predicted / self.measured.update - 1


def run(shards: list[Shard], setting: Setting, repeats: int, rank: Rank, *, follows: bool = False) -> Row:
    """Build, measure and print one setting. follows: its updates correct the machine's profile."""
    rank.together()
    begin = time.perf_counter()
    engine, lines = build_engine(shards, setting.config, warn=print, log=rank.say, together=all_ranks())
    built = time.perf_counter() - begin
    engine.keep_timelines(repeats)
    measured = measure(engine, repeats, rank.device, rank.together)
    timeline, total, expected = engine.timeline(), engine.layout.numel, engine.expected
    assert timeline is not None and expected is not None
    if follows and expected.profile.num_gpus:
        steps = engine.timelines()
        if lanes_are_off(expected, steps, LANE_TOLERANCE):
            keep_profile(corrected_profile(expected, steps))
    facts = expected.judge(timeline)
    assert facts is not None
    busy = " ".join(f"{lane} {share:.2f}" for lane, share in facts.busy.items())
    # What is timed begins with all gradients flushed and every slot filled.
    predicted = expected.timeline(Compute(0.0, ENDLESS_SECONDS)).in_place_seconds
    bound = f"{100 * facts.share_of_bound:.0f} % of its bound ({facts.lane})"
    placement = lines[2].split(", slots")[0].removeprefix("placement: ")
    rates = " ".join(f"{rate:.2f}" for rate in from_all_ranks(total / measured.update / 1e9))
    steadies = " ".join(f"{rate:.2f}" for rate in from_all_ranks(total / measured.steady / 1e9))
    name = f"{setting.name}: " if setting.name else ""
    rank.say(
        f"{name}split {setting.split} wire {setting.wire} share {setting.share} [{placement[:60]}]: update "
        f"{rates} G/s ({measured.update * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms), steady {steadies} G/s, "
        f"{bound}, busy {busy}, main thread {100 * measured.main_thread:.1f} %, built in {built:.1f} s"
    )
    share = gpu_share_of(engine.settings.placement)
    engine.close()
    return Row(setting, total, share, measured, predicted, bound)


def cover(num_subgroups: int, numel: int) -> list[Setting]:
    """Every share and the chosen one, other settings, and the shares again in reverse."""
    base = Setting("share", num_subgroups, numel)
    shares = [replace(base, share=f"{eighths / 8:g}") for eighths in range(9)] + [replace(base, name="chosen")]
    half = replace(base, share="0.5")
    others = [
        *(replace(base, name=f"stride {stride}", stride=str(stride)) for stride in (2, 3, 4, 8)),
        *(replace(base, name=f"resident {part}", resident=part) for part in (0.25, 0.5)),
        *(replace(base, name=f"{slots} slots", share="0.75", slots=str(slots)) for slots in (2, 4, 8)),
        *(replace(half, name=f"{threads} threads", threads=str(threads)) for threads in (4, 8, 12)),
        *(replace(base, name="fp32 wire", wire="fp32", share=share) for share in ("0", "0.5")),
        *(replace(base, name="12 B", split="off", share=share) for share in ("0.5", "0.75")),
        replace(half, name="half as large", numel=numel // 2, num_subgroups=2 * num_subgroups),
        replace(half, name="twice as large", numel=2 * numel, num_subgroups=num_subgroups // 2),
    ]
    return [*shares, *others, *reversed(shares)]


def cover_table(rows: Sequence[Row]) -> list[str]:
    """A line for each setting (medians of its rows), then what predictions and the choice are worth."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    lines = [
        "| setting | GPU share | update, predicted / measured ms | ratio | steady, G parameters/s | |",
        "|---|---|---|---|---|---|",
    ]
    steady = {}
    for setting, mine in by_setting.items():
        update = statistics.median(row.measured.update for row in mine)
        predicted = statistics.median(row.predicted for row in mine)
        turn = statistics.median(row.measured.steady for row in mine)
        steady[setting] = turn
        rate = mine[-1].numel / turn / 1e9
        lines.append(
            f"| {setting.name} {setting.share if setting.share != 'auto' else ''} | {mine[-1].share:.2f} | "
            f"{1e3 * predicted:.1f} / {1e3 * update:.1f} | {predicted / update:.3f} | {rate:.2f} | {mine[-1].bound} |"
        )
    errors = sorted(abs(row.error) for row in rows)
    lines.append(
        f"predictions are off by {100 * statistics.median(errors):.1f} % (median) and {100 * errors[-1]:.1f} % (most) "
        f"over {len(errors)} runs; {sum(error > 0.1 for error in errors)} are off by more than 10 %"
    )
    best = min((s for s in steady if s.name == "share"), key=lambda s: steady[s])
    chosen = next(s for s in steady if s.name == "chosen")
    lines.append(
        f"the best share of the sweep is {best.share}; the chosen one takes {steady[chosen] / steady[best]:.3f} times "
        "its steady time"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-subgroups", type=int, default=16)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,1,auto")
    parser.add_argument("--resident", type=float, default=0.0)
    parser.add_argument("--wires", default="param")
    parser.add_argument("--splits", default="on,off")
    parser.add_argument("--slots", default="auto")
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cover", action="store_true", help="the table of settings, each flag above but for sizes and repeats aside"
    )
    arguments = parser.parse_args()
    rank, size = join(), (arguments.num_subgroups, arguments.numel)
    shards = make_shards(*size, rank.device)
    if arguments.cover:
        with TemporaryDirectory() as cache:  # what these updates teach is not what the next training should go by
            os.environ["DEEP_OFFLOAD_CACHE"] = cache
            rows = [run(shards, setting, arguments.repeats, rank, follows=True) for setting in cover(*size)]
        rank.say("\n".join(cover_table(rows)))
    else:
        given = {"resident": arguments.resident, "slots": arguments.slots, "threads": arguments.threads}
        for split, wire, share in product(
            *(getattr(arguments, name).split(",") for name in ("splits", "wires", "shares"))
        ):
            run(shards, Setting("", *size, share=share, wire=wire, split=split, **given), arguments.repeats, rank)
    rank.together()
    if rank.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
