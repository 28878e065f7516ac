"""Rate of the update phase alone: synthetic gradients, real state, every lane at work.

    python -m benchmarks.update_phase --num-subgroups 16 --shares 0,0.5,1 [--splits off] [--resident 0.25]
    torchrun --nproc_per_node 2 -m benchmarks.update_phase ...       # all ranks of a host at once

Prints one line per setting: median parameters/s of the update (from the norm until all parameters are in place), of a
steady loop (update after update, flushes included), the prediction, busy shares of the lanes, and which part of the
update the launching thread works itself. With several ranks,
each has its own GPU and its share of the cores; they start each timed update together, and rates are listed by rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deep_offload.config import OffloadConfig
from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.shards import Segment, Shard
from deep_offload.plan.ops import Lane


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

    def gather(self, value: float) -> list[float]:
        """The value of each rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

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


def report(shards: list[Shard], config: OffloadConfig, repeats: int, rank: Rank) -> None:
    """Build, measure and print one setting."""
    rank.together()  # the machine's rates, measured by the first one, hold with all ranks at work
    begin = time.perf_counter()
    engine, lines = build_engine(shards, config, warn=print, log=rank.say)
    built = time.perf_counter() - begin
    measured = measure(engine, repeats, rank.device, rank.together)
    timeline, total = engine.timeline(), engine.layout.numel
    lanes = (lane for lane in Lane if lane is not Lane.MAIN)
    busy = " ".join(f"{lane.value} {timeline.busy_share(lane):.2f}" for lane in lanes)
    predicted = lines[-1].split(" ms")[0].rsplit(" ", 1)[-1]
    placement = lines[2].split(", slots")[0].removeprefix("placement: ")
    rates = " ".join(f"{rate:.2f}" for rate in rank.gather(total / measured.update / 1e9))
    steadies = " ".join(f"{rate:.2f}" for rate in rank.gather(total / measured.steady / 1e9))
    rank.say(
        f"split {config.offload_split_master} wire {config.offload_grad_wire} share {config.offload_gpu_share} "
        f"[{placement[:60]}]: update {rates} G/s ({measured.update * 1e3:.1f} ms, predicted {predicted} ms), steady "
        f"{steadies} G/s, busy {busy}, main thread {100 * measured.main_thread:.1f} %, built in {built:.1f} s"
    )
    engine.close()


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
    arguments = parser.parse_args()
    rank = join()
    shards = make_shards(arguments.num_subgroups, arguments.numel, rank.device)
    for split in arguments.splits.split(","):
        for wire in arguments.wires.split(","):
            for share in arguments.shares.split(","):
                config = OffloadConfig(
                    interleaved_offload=True,
                    offload_gpu_share="auto" if share == "auto" else float(share),
                    offload_resident_fraction=arguments.resident,
                    offload_subgroup_numel=arguments.numel,
                    offload_num_slots="auto" if arguments.slots == "auto" else int(arguments.slots),
                    offload_grad_wire=wire,
                    offload_split_master=split,
                    offload_cpu_threads="auto" if arguments.threads == "auto" else int(arguments.threads),
                )
                report(shards, config, arguments.repeats, rank)
    rank.together()
    if rank.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
