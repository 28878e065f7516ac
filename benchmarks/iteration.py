"""Iterations of pretrain_gpt.py beside other systems, at the same shape on the same GPU.

    python -m benchmarks.iteration --part full,half --output out/bench [--only ours_r0,ds_z2] [--limit-seconds 520]

Parts: compute (no offload against plain torch), full (nothing resident against full offload, residency chosen by the
program against none), half (half resident), stage3 (ZeRO-3), variants (fp32 gradients, one hardware queue, checks of
the update), batches (larger batches), backward (cost of the gradient flush), end_to_end and end_to_end_z3 (100 steps
with evaluation of a model of 1.07 B parameters). Each takes less than 9 minutes or is cut there; the same command again
goes on where it stopped. Within a part our runs stand between those of the others, and a ratio compares neighbors.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.runs import NUM_SETTLING, Record, Run, add_session_options, run_parts, spread

OFFLOAD = "--interleaved-offload"
NONE = Run("ours_none", expected_s=20)
R0 = Run("ours_r0", f"{OFFLOAD} --offload-resident-fraction 0", expected_s=20)
R05 = Run("ours_r05", f"{OFFLOAD} --offload-resident-fraction 0.5", expected_s=20)
AUTO = Run("ours_auto", OFFLOAD, iterations=16, expected_s=20)
FP32 = replace(R0, name="ours_r0_fp32_grads", fp32_grads=True)
VERIFY_INTERVAL = 4
VERIFIED = replace(
    R0, name="ours_r0_verified", words=f"{R0.words} --offload-verify-interval {VERIFY_INTERVAL}", iterations=27
)
ONE_CONNECTION = replace(R0, name="ours_r0_one_connection", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def peer(name: str, expected_s: float, words: str = "") -> Run:
    return Run(name, words, ours=False, expected_s=expected_s)


PLAIN, Z2, Z3 = peer("none", 30), peer("ds_z2", 85), peer("ds_z3", 130)
HDO, HDO_HALF, FSDP2 = peer("hdo1.0", 80), peer("hdo0.5", 60), peer("fsdp2", 80)
TWIN_HALF = peer("ds_ratio0.5", 80)

_EVALUATED = "--eval-iters 8 --eval-interval 50"
_LONG = "--warmup 0 --phased 0 --whole 100 --eval-interval 50 --eval-batches 8"
_ENDS = [replace(run, shape="1.1b", iterations=100, evaluation=_EVALUATED, expected_s=50) for run in (R0, AUTO)]
_Z2_END, _Z3_END = (replace(peer(name, 180, _LONG), shape="1.1b") for name in ("ds_z2", "ds_z3"))


def _batch(run: Run, size: int, count: int, iterations: int) -> Run:
    name = f"{run.name}_{size}x{count}"
    return replace(run, name=name, micro_batch_size=size, num_micro_batches=count, iterations=iterations, expected_s=75)


def _backward(run: Run) -> Run:
    return replace(run, name=f"{run.name}_timed", words=f"{run.words} --timing-log-level 2")


_CPU_ONLY = replace(R0, name="ours_cpu", words=f"{R0.words} --offload-gpu-share 0")
_16K, _32K, _128K = ((_batch(NONE, s, c, n), _batch(R0, s, c, n)) for s, c, n in ((8, 1, 10), (8, 2, 9), (8, 8, 7)))

PARTS: dict[str, list[Run]] = {
    "compute": [PLAIN, NONE, PLAIN, NONE],
    "full": [R0, Z2, R0, HDO, R0, FSDP2, R0, NONE, AUTO, NONE],
    "half": [R05, TWIN_HALF, R0, HDO_HALF, R05],
    "stage3": [R0, Z3, R0],
    "variants": [R0, FP32, R0, ONE_CONNECTION, R0, VERIFIED],
    "batches": [*_16K, *_32K, *_128K],
    "backward": [_backward(NONE), _backward(_CPU_ONLY), _backward(NONE), _backward(R0), _backward(_CPU_ONLY)],
    "end_to_end": [_ENDS[0], _Z2_END, _ENDS[1]],
    "end_to_end_z3": [_ENDS[0], _Z3_END],
}

SMOKE = [
    replace(PLAIN, shape="tiny", words="--threads 1 --warmup 0 --phased 1 --whole 2"),
    replace(R0, shape="tiny", iterations=3, words=R0.words + " --offload-gpu-share 0.5 --offload-subgroup-numel 65536"),
]


@dataclass(frozen=True, slots=True)
class Target:
    """In `part`, the iteration of `slow` takes at least `least` (or at most `most`) times that of `fast`."""

    part: str
    slow: str
    fast: str
    least: float | None = None
    most: float | None = None

    def verdict(self, ratio: float) -> str:
        if self.least is not None:
            return f">= {self.least}: " + ("reached" if ratio >= self.least else "MISSED")
        if self.most is not None:
            return f"<= {self.most}: " + ("reached" if ratio <= self.most else "MISSED")
        return "reported"


TARGETS = (
    Target("compute", "ours_none", "none", most=1 / 0.9),
    Target("full", "ds_z2", "ours_r0", 2.5),
    Target("full", "hdo1.0", "ours_r0", 4.2),
    Target("full", "fsdp2", "ours_r0", 4.6),
    Target("full", "ours_auto", "ours_none", most=1.1),
    Target("stage3", "ds_z3", "ours_r0", 5.0),
    Target("half", "ds_ratio0.5", "ours_r0", 3.5),
    Target("half", "ds_ratio0.5", "ours_r05", 6.0),
    Target("half", "hdo0.5", "ours_r05", 3.5),
    Target("variants", "ours_r0_fp32_grads", "ours_r0"),
    Target("variants", "ours_r0_one_connection", "ours_r0"),
    Target("batches", "ours_r0_8x1", "ours_none_8x1"),
    Target("batches", "ours_r0_8x2", "ours_none_8x2", most=1.35),
    Target("batches", "ours_r0_8x8", "ours_none_8x8", most=1.10),
    Target("end_to_end", "ds_z2", "ours_r0"),
    Target("end_to_end_z3", "ds_z3", "ours_r0"),
    Target("smoke", "none", "ours_r0"),
)


def neighbor_ratios(records: Sequence[Record], slow: str, fast: str) -> list[float]:
    """Return, for each run of `slow`, its iteration over that of the nearest runs of `fast` on both sides.

    Only runs of the same boot of a machine count; one neighbor is enough.
    """
    done = [record for record in records if "failed" not in record]
    ratios = []
    for record in (r for r in done if r["name"] == slow):
        others = [r for r in done if r["name"] == fast and r["machine"] == record["machine"]]
        before = [r for r in others if r["position"] < record["position"]][-1:]
        after = [r for r in others if r["position"] > record["position"]][:1]
        near = [r["iteration_ms"] for r in (*before, *after)]
        if near:
            ratios.append(record["iteration_ms"] / (sum(near) / len(near)))
    return ratios


def report(part: str, records: Sequence[Record]) -> list[str]:
    """Return the part's tables: medians with spread by name, then ratios beside their targets."""
    lines = [f"## {part}", "| run | iteration, ms | update, ms | G parameters/s | GPU, GiB | host, GiB | runs |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(record["name"] for record in records):
        mine = [r for r in records if r["name"] == name and "failed" not in r]
        if not mine:
            lines.append(f"| {name} | failed | | | | | |")
            continue
        update = [r.get("update_ms") or r.get("step_ms") for r in mine]
        rate = [r["update_g_per_s"] for r in mine if "update_g_per_s" in r]
        gpu = max((r.get("gpu_gib", 0.0) for r in mine), default=0.0)
        host = max(r["host_gib"] for r in mine)
        times = spread([u for u in update if u]) if any(update) else ""
        rates = f"{sum(rate) / len(rate):.2f}" if rate else ""
        iterations = spread([r["iteration_ms"] for r in mine])
        lines.append(f"| {name} | {iterations} | {times} | {rates} | {gpu} | {host} | {len(mine)} |")
    for target in (t for t in TARGETS if t.part == part):
        ratios = neighbor_ratios(records, target.slow, target.fast)
        if ratios:
            middle = sorted(ratios)[len(ratios) // 2]
            values = " ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"{target.slow} / {target.fast}: {values}; {target.verdict(middle)}")
    return [*lines, *_backward_lines(records), *_drift_lines(records), *_verify_lines(records)]


def _backward_lines(records: Sequence[Record]) -> list[str]:
    """Backward passes beside the time that their gradients need on the link are compared by hand: print both."""
    timed = [r for r in records if "backward-compute" in r.get("times_ms", {})]
    return [
        f"{r['name']}: forward {r['times_ms'].get('forward-compute')} ms, backward {r['times_ms']['backward-compute']} "
        f"ms, optimizer {r['times_ms'].get('optimizer')} ms, D2H {r['traffic'].get('d2h_bytes', 0)} bytes in all"
        for r in timed
    ]


def _drift_lines(records: Sequence[Record]) -> list[str]:
    """Late iterations beside early ones, for runs that are long enough."""
    lines = []
    for record in records:
        times = record.get("iterations_ms", [])
        if len(times) >= 50:
            early, late = sorted(times[4:9])[2], sorted(times[-5:])[2]
            lines.append(
                f"{record['name']}: iterations 5-9 {early:.1f} ms, last five {late:.1f} ms ({late / early:.3f}), "
                f"training {record['train_s']} s, process {record['process_s']} s"
            )
    return lines


def _verify_lines(records: Sequence[Record]) -> list[str]:
    """Steps with a check of --offload-verify-interval beside the others, and how rare checks must be to cost 0.5 %."""
    lines = []
    for record in (r for r in records if r["name"] == VERIFIED.name and "iterations_ms" in r):
        steps = list(enumerate(record["iterations_ms"], start=1))[NUM_SETTLING:]
        step_ms = dict(steps)
        other = statistics.median(ms for step, ms in steps if step % VERIFY_INTERVAL > 1)
        # The step behind a check finds its parameters in place, since the check waited for them.
        pairs = [ms + step_ms[step + 1] for step, ms in steps if step % VERIFY_INTERVAL == 0 and step + 1 in step_ms]
        cost = statistics.median(pairs) - 2 * other
        lines.append(
            f"{VERIFIED.name}: a check takes {cost:.0f} ms ({spread(pairs)} ms with the step behind it, {other:.0f} ms "
            f"a step without): 0.5 % with --offload-verify-interval {math.ceil(max(0.0, cost) / (0.005 * other))}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="compute,full,half,stage3", help=f"of {', '.join(PARTS)}; a comma between")
    add_session_options(parser)
    options = parser.parse_args()
    parts = {"smoke": SMOKE} if options.smoke else {name: PARTS[name] for name in options.part.split(",")}
    return run_parts(parts, options, report)


if __name__ == "__main__":
    sys.exit(main())
