"""The gradient flush alone: bytes a second of its lane beside a bare copy from the GPU into pinned memory.

    python -m benchmarks.flush [--num-subgroups 16] [--numel 67108864] [--wires param,fp32]

Everything is updated on the CPU, so every gradient goes to the host. Both are measured in turns. Without a GPU the copy
is one within host memory, and the figures say nothing about a link.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from benchmarks.update_phase import make_shards
from deep_offload.config import OffloadConfig
from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.engine import OffloadEngine


class BareLink:
    """Copies of one subgroup's gradients into pinned memory, one after the other, nothing else at work."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._source = torch.zeros(numel, dtype=dtype, device=device)
        self._target = torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")

    def seconds(self, num_copies: int) -> float:
        """Time `num_copies` copies."""
        _settle(self._source.device)
        start = time.perf_counter()
        for _ in range(num_copies):
            self._target.copy_(self._source, non_blocking=True)
        _settle(self._source.device)
        return time.perf_counter() - start


def flush_seconds(engine: OffloadEngine) -> float:
    """Time the flush of all gradients, in the order of a backward pass."""
    engine.synchronize()
    start = time.perf_counter()
    for i in reversed(range(len(engine.layout.subgroups))):
        engine.grads_ready(i)
    engine.synchronize()
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(num_subgroups: int, numel: int, wire: str, repeats: int, device: torch.device) -> str:
    """Return the line of one wire. Raises ValueError where the state does not fit."""
    config = OffloadConfig(
        interleaved_offload=True,
        offload_gpu_share=0.0,
        offload_resident_fraction=0.0,
        offload_subgroup_numel=numel,
        offload_grad_wire=wire,
    )
    engine, _ = build_engine(make_shards(num_subgroups, numel, device), config, warn=print, log=lambda line: None)
    dtype = torch.float32 if wire == "fp32" else torch.bfloat16
    link = BareLink(numel, dtype, device)
    total = num_subgroups * numel * dtype.itemsize
    flushes, copies = [], []
    for step in range(1, repeats + 3):
        copies.append(link.seconds(num_subgroups))
        flushes.append(flush_seconds(engine))
        engine.update([AdamClass(1e-4, 0.9, 0.95, 1e-8, 0.1, step)], [0], 0.9)
        engine.wait_until_reusable()
    engine.close()
    flush, copy = (total / statistics.median(times[2:]) / 1e9 for times in (flushes, copies))
    return f"wire {wire}: flush {flush:.2f} GB/s, bare copy {copy:.2f} GB/s, {100 * flush / copy:.1f} % of the link"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-subgroups", type=int, default=16)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--wires", default="param,fp32")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for wire in options.wires.split(","):
        print(measure(options.num_subgroups, options.numel, wire, options.repeats, device), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
