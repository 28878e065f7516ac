"""Predicted updates beside measured ones, what a trace costs, and how much of the time it explains.

    python -m benchmarks.trace_overhead --output out/trace [--iterations 15] [--smoke]

Trains a GPT of 1.07 B parameters in four wide layers, whose passes take the same time each iteration, with nothing
resident: with shares 0, 1/2 and 1 with a trace of most steps; then with the chosen share, without and with
`--offload-trace FILE --offload-trace-steps 3` by turns. The launching thread's time in the marks of a trace is counted
besides, since runs differ by more than that. Ends with code 1 where less than 95 % of an update is attributed.
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
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from benchmarks import worker
from benchmarks.exactness import SETTINGS
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
STEPS = 3
NUM_PAIRS = 3
LEAST_ATTRIBUTED = 0.95
HEAD = (
    "Milliseconds, medians. In place: until the last parameter is updated. Update: until the last flush, as logged; "
    "its prediction is the trace's, with the measured backward pass.",
    "| share | predicted in place | measured | ratio | predicted update | measured | ratio | first/last | iteration |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run printed, milliseconds, and its trace: steps by name (`measured`, `predicted`).

    marks_ms: what the launching thread spent on marks in all iterations.
    """

    num_iterations: int
    elapsed: tuple[float, ...]
    updates: tuple[float, ...]
    predicted: float
    placement: str
    steps: dict[str, list[Timeline]]
    marks_ms: float = 0.0


def train(arguments: Sequence[str], log: Path, trace: Path | None) -> Run:
    """Do what pretrain_gpt.py does, in this process: a start of its own for each run would take most of the time."""
    words = [] if trace is None else ["--offload-trace", str(trace)]
    started = time.monotonic()
    log.unlink(missing_ok=True)
    with marks_timed() as spent:
        worker.train([*arguments, *words], log)
    print(f"{log.stem}: {time.monotonic() - started:.1f} s", flush=True)
    return replace(read_run(log.read_text(), trace), marks_ms=1e3 * sum(spent))


@contextlib.contextmanager
def marks_timed() -> Iterator[list[float]]:
    """Collect the seconds of each mark that a trace makes in the training loop."""
    spent: list[float] = []
    mark = StepMarks._mark

    def timed(self: StepMarks, kind: str, micro_batch: int) -> None:
        start = time.perf_counter()
        mark(self, kind, micro_batch)
        spent.append(time.perf_counter() - start)

    with mock.patch.object(StepMarks, "_mark", timed):
        yield spent


def read_run(text: str, trace: Path | None) -> Run:
    """Read a run's output and trace. Raises LookupError for one that is not complete."""
    elapsed = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    # A line shows the update of the step before, so the first ones are as unsettled as those of iterations.
    updates = [float(t) for t in re.findall(r"offload update: (\S+) ms", text)]
    lanes = {} if trace is None else read_trace(json.loads(trace.read_text()))
    return Run(
        num_iterations=len(elapsed),
        elapsed=tuple(elapsed[NUM_SETTLING:] or elapsed[-1:]),
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
        f"{spread(run.elapsed)} |"
    )


def overhead_lines(without: Sequence[Run], traced: Sequence[Run]) -> list[str]:
    """Medians of all iterations of each kind, and of each run."""
    lines, medians = [], []
    for name, runs in (("without", without), ("with", traced)):
        values = [t for run in runs for t in run.elapsed]
        medians.append(statistics.median(values))
        each = ", ".join(f"{statistics.median(run.elapsed):.2f}" for run in runs)
        lines.append(f"iteration {name} --offload-trace: {medians[-1]:.2f} ms (median of each run: {each})")
    marks = statistics.median(run.marks_ms / run.num_iterations for run in traced)
    return [
        *lines,
        f"difference: {100 * (medians[1] / medians[0] - 1):+.2f} %",
        f"the launching thread makes marks for {marks:.3f} ms of an iteration: {100 * marks / medians[1]:.3f} %",
    ]


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
    batch = f"--micro-batch-size 1 --global-batch-size 2 --train-iters {iterations} --grad-reduce-in-bf16"
    shape = SHAPES["tiny" if options.smoke else "1.1b"].command()
    small = "--use-cpu --offload-subgroup-numel 65536" if options.smoke else ""
    common = shlex.split(f"{shape} {TRAINING} {NO_EVALUATION} {batch} --interleaved-offload {small}")

    def run(name: str, log: str, num_steps: int) -> Run:
        trace = options.output / f"{log}.json" if num_steps else None
        steps = ["--offload-trace-steps", str(num_steps)] if num_steps else []
        return train([*common, *shlex.split(SETTINGS[name]), *steps], options.output / f"{log}.log", trace)

    names, num_pairs = (SHARES[1:2], 1) if options.smoke else (SHARES, NUM_PAIRS)
    shares = {name: run(name, name.replace("/", "_").replace(" ", "_"), max(2, iterations - 5)) for name in names}
    plain, traced = [], []
    for i in range(2 * num_pairs):
        if (i + 1) // 2 % 2 == 0:  # plain, traced, traced, plain, ...: a drift of the machine meets both alike
            plain.append(run(AUTO, f"auto_plain_{i}", 0))
        else:
            traced.append(run(AUTO, f"auto_traced_{i}", STEPS))
    shares[AUTO] = traced[0]
    print("\n".join(HEAD))
    for name, one in shares.items():
        print(prediction_line(name, one))
    print("\n".join(overhead_lines(plain, traced)))
    traces = [*shares.items(), (f"{AUTO} again", traced[-1])]
    print("\n".join(attribution_line(name, one.steps[MEASURED]) for name, one in traces))
    least = min(attributed(one.steps[MEASURED]) for _, one in traces)
    if least < LEAST_ATTRIBUTED:
        print(f"LESS THAN {100 * LEAST_ATTRIBUTED:.0f} % OF AN UPDATE IS ATTRIBUTED")
    return 0 if least >= LEAST_ATTRIBUTED or options.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
