"""Rate of the update phase alone: synthetic gradients, real state, every lane at work.

    python -m benchmarks.update_phase --num-subgroups 16 --shares 0,0.5,1 [--no-split] [--resident 0.25]

Prints one line per setting: median parameters/s of the update (from the norm until all parameters are in place), of a
steady loop (update after update, flushes included), the prediction, and busy shares of the lanes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from deep_offload.config import OffloadConfig
from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.engine import OffloadEngine, Segment, Shard
from deep_offload.plan.ops import Lane


def make_shards(num_subgroups: int, numel: int, device: torch.device) -> list[Shard]:
    """bf16 weights and gradients of `num_subgroups * numel` parameters in one shard, with random values."""
    total = num_subgroups * numel
    weight = torch.empty(total, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    grad = torch.empty(total, dtype=torch.bfloat16, device=device).normal_(0, 0.01)
    return [Shard(weight, grad, (Segment(0, total, 0),))]


def measure(engine: OffloadEngine, repeats: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of one update with gradients flushed before it, and of one turn of a steady loop."""
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        engine.update([AdamClass(1e-4, 0.9, 0.95, 1e-8, 0.1, step)], [0], 0.9)

    singles = []
    for _ in range(repeats + 2):
        for i in reversed(range(len(engine.layout.subgroups))):
            engine.grads_ready(i)
        engine.synchronize()
        start = time.perf_counter()
        update()
        engine.wait_until_reusable()
        _synchronize(device)
        singles.append(time.perf_counter() - start)
    engine.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        update()
        engine.wait_until_reusable()
    engine.synchronize()
    return statistics.median(singles[2:]), (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-subgroups", type=int, default=16)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,1,auto")
    parser.add_argument("--resident", type=float, default=0.0)
    parser.add_argument("--wires", default="param")
    parser.add_argument("--splits", default="on,off")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = make_shards(arguments.num_subgroups, arguments.numel, device)
    total = arguments.num_subgroups * arguments.numel
    for split in arguments.splits.split(","):
        for wire in arguments.wires.split(","):
            for share in arguments.shares.split(","):
                config = OffloadConfig(
                    interleaved_offload=True,
                    offload_gpu_share="auto" if share == "auto" else float(share),
                    offload_resident_fraction=arguments.resident,
                    offload_subgroup_numel=arguments.numel,
                    offload_num_slots=arguments.slots,
                    offload_grad_wire=wire,
                    offload_split_master=split,
                    offload_cpu_threads="auto" if arguments.threads == "auto" else int(arguments.threads),
                )
                begin = time.perf_counter()
                engine, lines = build_engine(shards, config, warn=print, log=print)
                built = time.perf_counter() - begin
                seconds, steady = measure(engine, arguments.repeats, device)
                timeline = engine.timeline()
                lanes = (lane for lane in Lane if lane is not Lane.MAIN)
                busy = " ".join(f"{lane.value} {timeline.busy_share(lane):.2f}" for lane in lanes)
                predicted = lines[-1].split(" ms")[0].rsplit(" ", 1)[-1]
                placement = lines[2].split(", slots")[0].removeprefix("placement: ")
                print(
                    f"split {split} wire {wire} share {share} [{placement[:60]}]: update "
                    f"{total / seconds / 1e9:.2f} G/s "
                    f"({seconds * 1e3:.1f} ms, predicted {predicted} ms), steady {total / steady / 1e9:.2f} G/s, "
                    f"busy {busy}, built in {built:.1f} s",
                    flush=True,
                )
                engine.close()


if __name__ == "__main__":
    main()
