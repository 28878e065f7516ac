"""The CPU update alone, beside the same traffic without arithmetic and beside torch's fused AdamW.

    python -m benchmarks.cpu_adam [--numel 67108864] [--threads 15]

All are measured in turns, so that a drift of the machine hits all of them; medians and their ratios are printed.
Moments below the smallest normal number are a case of their own: many processors take such operands slowly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from deep_offload.kernels import cpu
from deep_offload.kernels.scalars import AdamClass, scalar_row
from deep_offload.runtime.arena import ArraySpec, HostArena
from deep_offload.runtime.limits import read_host_limits

OURS = "ours, 16-bit gradient and weight"
SUBNORMAL = "ours, subnormal moments"
PATTERN = "pattern of ours, 16-bit"
ORDINARY_RANGES = ((-0.02, 0.02), (-1e-3, 1e-3), (1e-8, 1e-6), (-0.01, 0.01))
SUBNORMAL_RANGES = ((-0.02, 0.02), (-1e-39, 1e-39), (0.0, 1e-39), (-1e-39, 1e-39))
"""Of masters, exp_avg, exp_avg_sq and gradients."""
_BLOCK_NUMEL = 1 << 20


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fill_with(array: torch.Tensor, low: float, high: float) -> None:
    """Uniform numbers, a block of them again and again: drawing all takes one thread seconds."""
    block = torch.empty(min(array.numel(), _BLOCK_NUMEL)).uniform_(low, high)
    for piece in array.split(block.numel()):
        piece.copy_(block[: piece.numel()])


def measure(numel: int, num_threads: int, repeats: int) -> dict[str, float]:
    """Median parameters per second of each contender, all on arrays of one arena."""
    specs = [ArraySpec(numel, torch.float32)] * 4 + [ArraySpec(numel, torch.bfloat16)]
    arena = HostArena(specs, pin=False, num_threads=num_threads, warn=print)
    master, exp_avg, exp_avg_sq, grad32, grad16 = arena.arrays
    scalars = torch.tensor([scalar_row(AdamClass(1e-4, 0.9, 0.95, 1e-8, 0.1, 10))])
    segments = torch.tensor([[0, numel, 0]])

    def fill(ranges: Sequence[tuple[float, float]]) -> None:
        for array, (low, high) in zip((master, exp_avg, exp_avg_sq, grad32), ranges, strict=True):
            fill_with(array, low, high)
        grad16.copy_(grad32)

    def ours(grad: torch.Tensor, weight: torch.Tensor | None) -> None:
        cpu.adam_update(master, exp_avg, exp_avg_sq, grad, weight, segments, scalars, 0.9, True, num_threads)

    fill(ORDINARY_RANGES)
    parameter = torch.nn.Parameter(master)
    parameter.grad = grad32
    torch.set_num_threads(num_threads)
    theirs = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    theirs.step()
    contenders: dict[str, Callable[[], object]] = {
        OURS: lambda: ours(grad16, grad16),
        "ours, fp32 gradient, no weight": lambda: ours(grad32, None),
        "torch fused AdamW, fp32": theirs.step,
        SUBNORMAL: lambda: ours(grad16, grad16),
        PATTERN: lambda: cpu.adam_pattern_seconds(master, exp_avg, exp_avg_sq, grad16, grad16, num_threads),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            fill(SUBNORMAL_RANGES if name == SUBNORMAL else ORDINARY_RANGES)
            times[name].append(seconds(call))
    return {name: numel / statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=max(1, read_host_limits().cores - 1))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rates = measure(options.numel, options.threads, options.repeats)
    base = rates[PATTERN]
    print(f"CPU update of {options.numel:,} parameters, {options.threads} threads, {cpu.selected_isa()}")
    for name, rate in rates.items():
        print(f"  {name:34s} {rate / 1e9:6.3f} G parameters/s, {rate / base:5.2f} x the pattern")
    print(f"  subnormal moments take {rates[OURS] / rates[SUBNORMAL]:.2f} x the time of normal ones")


if __name__ == "__main__":
    main()
