"""Predicted updates beside measured ones, what a trace costs, and how much of the time it explains.

    python -m benchmarks.trace_overhead --output out/trace [--iterations 15] [--smoke]

Trains a GPT of 1.07 B parameters in four wide layers, whose passes take the same time each iteration, with nothing
resident and with a trace: with shares 0, 1/2 and 1, and with the chosen one. Then, for shares 1 and chosen, a longer
run in which every other step goes without the marks that a trace makes, in its second half the other ones: machines
drift, so a step is compared with its two neighbors. Ends with code 1 where less than 95 % of an update is attributed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from benchmarks import worker
from benchmarks.exactness import SETTINGS, file_stem
from benchmarks.runs import NO_EVALUATION, NUM_SETTLING, TRAINING, spread
from benchmarks.shapes import SHAPES
from deep_offload.model.trace import MEASURED, PREDICTED, attributed_share, explained_share
from deep_offload.optimizer.step_marks import StepMarks
from deep_offload.plan.draw import read_trace
from deep_offload.plan.ops import OpKind
from deep_offload.plan.timeline import Timeline
from megatron.training.quiet import leave_out_known_warnings

SHARES = ("share 0", "share 1/2", "share 1")
AUTO = "share auto"
NUM_ALTERNATING = 8
"""A run whose every other step is marked is so many times as long."""

LEAST_ATTRIBUTED = 0.95
HEAD = (
    "Milliseconds, medians. In place: until the last parameter is updated. Update: until the last flush, as logged; "
    "its prediction is the trace's, with the measured backward pass.",
    "| share | predicted in place | measured | ratio | predicted update | measured | ratio | first/last | iteration |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run printed, milliseconds, and its trace: steps by name (`measured`, `predicted`)."""

    elapsed: tuple[float, ...]
    updates: tuple[float, ...]
    predicted: float
    placement: str
    steps: dict[str, list[Timeline]]


def train(arguments: Sequence[str], log: Path, trace: Path) -> Run:
    """Do what pretrain_gpt.py does, in this process: a start of its own for each run would take most of the time."""
    started = time.monotonic()
    log.unlink(missing_ok=True)
    worker.train([*arguments, "--offload-trace", str(trace)], log)
    print(f"{log.stem}: {time.monotonic() - started:.1f} s", flush=True)
    return read_run(log.read_text(), trace)


@contextlib.contextmanager
def every_other_step_marked(num_steps: int) -> Iterator[list[float]]:
    """Leave the marks out of every second step; collects the launching thread's milliseconds in marks, step by step."""
    spent: list[float] = []
    begin, mark = StepMarks.begin, StepMarks._mark

    def begun(self: StepMarks) -> None:
        begin(self)
        self._in_step = self._in_step and is_marked(len(spent), num_steps)
        spent.append(0.0)

    def timed(self: StepMarks, kind: str, micro_batch: int) -> None:
        start = time.perf_counter()
        mark(self, kind, micro_batch)
        spent[-1] += 1e3 * (time.perf_counter() - start)

    with mock.patch.object(StepMarks, "_mark", timed), mock.patch.object(StepMarks, "begin", begun):
        yield spent


def is_marked(step: int, num_steps: int) -> bool:
    """Even steps of the first half, odd ones of the second: what returns every second step is no mark's cost."""
    return step % 2 == (step >= num_steps // 2)


def read_run(text: str, trace: Path) -> Run:
    """Read a run's output and trace. Raises LookupError for one that is not complete."""
    elapsed = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    # A line shows the update of the step before, so the first ones are as unsettled as those of iterations.
    updates = [float(t) for t in re.findall(r"offload update: .*?\((\S+) with", text)]
    lanes = read_trace(json.loads(trace.read_text()))
    return Run(
        elapsed=tuple(elapsed),
        updates=tuple(updates[NUM_SETTLING:] or updates[-1:]),
        predicted=float(re.findall(r"predicted update: (\S+) ms", text)[0]),
        placement=re.findall(r"placement: (.*?), stride", text)[0],
        steps={name: split_steps(timeline) for name, timeline in lanes.items()},
    )


def split_steps(joined: Timeline) -> list[Timeline]:
    """A file holds equal steps one behind the other: cut them apart. Phases go to the step whose norm comes next."""
    norms = [span.end for span in joined.spans if span.op.kind is OpKind.NORM_READY]
    size = len(joined.spans) // max(1, len(norms))
    steps = []
    for i, norm in enumerate(norms):
        before = norms[i - 1] if i else float("-inf")
        phases = tuple(phase for phase in joined.phases if before < phase.end <= norm)
        steps.append(Timeline(joined.spans[i * size : (i + 1) * size], phases))
    return steps


def prediction_line(name: str, run: Run) -> str:
    """A row of the table of predictions."""
    in_place = statistics.median(1e3 * step.in_place_seconds for step in run.steps[MEASURED])
    whole = statistics.median(1e3 * step.update_seconds for step in run.steps[PREDICTED])
    update = statistics.median(run.updates)
    return (
        f"| {name} ({run.placement}) | {run.predicted:.1f} | {in_place:.1f} | {run.predicted / in_place:.3f} | "
        f"{whole:.1f} | {spread(run.updates)} | {whole / update:.3f} | {run.predicted / update:.3f} | "
        f"{spread(run.elapsed[NUM_SETTLING:] or run.elapsed)} |"
    )


def overhead_line(name: str, elapsed: Sequence[float], spent: Sequence[float]) -> str:
    """What marks cost: marked steps beside the mean of their neighbors without, and the time in marks."""
    assert len(spent) == len(elapsed)
    half = len(elapsed) // 2
    marked = [
        i
        for i in range(NUM_SETTLING, len(elapsed) - 1)
        if is_marked(i, len(elapsed)) and i not in (half - 1, half)  # there two of a kind meet
    ]
    difference = {i: elapsed[i] - (elapsed[i - 1] + elapsed[i + 1]) / 2 for i in marked}
    halves = [[d for i, d in difference.items() if (i < half) == is_first] for is_first in (True, False)]
    middle = statistics.mean(map(statistics.median, halves))
    error = sum(median_error(half) ** 2 for half in halves) ** 0.5 / 2
    whole, in_marks = statistics.median(elapsed), statistics.median(spent[i] for i in marked)
    return (
        f"{name}: steps with marks take {middle:+.3f} +- {error:.3f} ms more ({100 * middle / whole:+.3f} +- "
        f"{100 * error / whole:.3f} % of {whole:.1f} ms, {len(marked)} steps beside their neighbors); the "
        f"launching thread makes marks for {in_marks:.3f} ms of an iteration: {100 * in_marks / whole:.3f} %"
    )


def median_error(values: Sequence[float]) -> float:
    """Standard error of a median, from the median distance to it, which single late steps do not move.

    Values next to each other share a neighbor, so as many count as if every tenth were left out.
    """
    distance = statistics.median(abs(value - statistics.median(values)) for value in values)
    return 1.1 * 1.253 * 1.483 * distance / len(values) ** 0.5


def attributed(steps: Sequence[Timeline]) -> float:
    """Part of an update in which a lane works: median over the steps."""
    return statistics.median(map(attributed_share, steps))


def attribution_line(name: str, steps: Sequence[Timeline]) -> str:
    """What the trace of a run explains."""
    least = min(map(attributed_share, steps))
    return (
        f"{name}: {100 * attributed(steps):.2f} % of the update attributed (least of {len(steps)}: {100 * least:.2f} "
        f"%), {100 * explained_share(steps):.2f} % of the iteration"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/trace"))
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, on generated tokens")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    leave_out_known_warnings()
    options.output.mkdir(parents=True, exist_ok=True)
    iterations = 6 if options.smoke else options.iterations
    batch = "--micro-batch-size 1 --global-batch-size 2 --grad-reduce-in-bf16"
    shape = SHAPES["tiny" if options.smoke else "1.1b"].command()
    small = "--use-cpu --offload-subgroup-numel 65536" if options.smoke else ""
    common = shlex.split(f"{shape} {TRAINING} {NO_EVALUATION} {batch} --interleaved-offload {small}")

    def run(name: str, log: str, num_iterations: int, num_steps: int) -> Run:
        words = f"{SETTINGS[name]} --train-iters {num_iterations} --offload-trace-steps {num_steps}"
        return train([*common, *shlex.split(words)], options.output / f"{log}.log", options.output / f"{log}.json")

    names = SHARES[1:2] if options.smoke else (*SHARES, AUTO)
    runs = {name: run(name, file_stem(name), iterations, max(2, iterations - 5)) for name in names}
    print("\n".join(HEAD))
    for name, one in runs.items():
        print(prediction_line(name, one))
    for name in names[-2:]:
        with every_other_step_marked(NUM_ALTERNATING * iterations) as spent:
            longer = run(name, f"{file_stem(name)}_marks", NUM_ALTERNATING * iterations, 1)
        print(overhead_line(name, longer.elapsed, spent))
    traces = runs.items()
    print("\n".join(attribution_line(name, one.steps[MEASURED]) for name, one in traces))
    least = min(attributed(one.steps[MEASURED]) for _, one in traces)
    if least < LEAST_ATTRIBUTED:
        print(f"LESS THAN {100 * LEAST_ATTRIBUTED:.0f} % OF AN UPDATE IS ATTRIBUTED")
    return 0 if least >= LEAST_ATTRIBUTED or options.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
