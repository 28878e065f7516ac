"""The published sweeps, repeated with pretrain_gpt.py: one setting is varied, predicted stands beside measured.

    python -m benchmarks.sweeps --part stride,resident --output out/bench [--limit-seconds 520]

Parts: stride, resident, micro_batch, accumulation, threads, subgroup (a model of 1.07 B parameters), followed (23
settings, rates corrected by each for the next), budgets (3.48 B with residency chosen within a budget of GPU memory),
sizes (the published 7B and 8.3B models beside the 3.48 B one).
Each is cut before 9 minutes; the same command again goes on where it stopped. The last lines sum up how far predictions
were off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.iteration import AUTO, NONE, R0, R05
from benchmarks.runs import Record, Run, add_session_options, run_parts

SMALL = replace(R0, shape="1.1b", iterations=10, expected_s=12)
SMALL_NONE = replace(NONE, shape="1.1b", iterations=10, expected_s=10)
BUDGETS = (16, 20, 24, 32, 48)


def vary(run: Run, label: str, flag: str, values: Sequence[object], expected_s: float | None = None) -> list[Run]:
    """Return the run once for each value of a flag."""
    seconds = run.expected_s if expected_s is None else expected_s
    return [replace(run, name=f"{label}_{v}", words=f"{run.words} {flag} {v}", expected_s=seconds) for v in values]


def batches(pairs: Sequence[tuple[int, int]]) -> list[Run]:
    """Return no offload and nothing resident side by side for each micro-batch size and number of micro-batches."""
    runs = []
    for size, count in pairs:
        for run in (SMALL_NONE, SMALL):
            sizes = {"micro_batch_size": size, "num_micro_batches": count}
            runs.append(replace(run, name=f"{run.name}_{size}x{count}", **sizes))
    return runs


def followed() -> list[Run]:
    """Many placements one after another, each long enough that its updates correct the rates that the next goes by."""
    share = "--offload-gpu-share"
    words = [
        *(f"{share} {part}" for part in (0.5, 0, 0.75, 0.875, 1)),
        *(f"--offload-stride {stride}" for stride in (4, 3, 8, 2)),
        *(f"--offload-resident-fraction {part}" for part in (0, 0.25, 0.5)),
        f"{share} 0.5 --offload-grad-wire fp32",
        f"{share} 0.5 --offload-split-master off",
        *(f"--offload-subgroup-numel {n * 10**6}" for n in (30, 100, 10)),
        *(f"{share} 0.75 --offload-num-slots {slots}" for slots in (2, 8)),
    ]
    small = replace(SMALL, iterations=18)
    settings = [
        replace(small, name=w.replace("--offload-", "").replace(" ", "_"), words=f"{R0.words} {w}") for w in words
    ]
    larger = [
        replace(small, name=f"{m}x{n}", micro_batch_size=m, num_micro_batches=n) for m, n in ((4, 1), (1, 4), (1, 8))
    ]
    return [*settings, *larger, replace(R0, iterations=18)]


PARTS: dict[str, list[Run]] = {
    "stride": [SMALL, *vary(SMALL, "stride", "--offload-stride", ("none", 1, 2, 3, 4, 6, 8, 10)), SMALL],
    "resident": vary(SMALL, "resident", "--offload-resident-fraction", (0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    "micro_batch": batches([(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)]),
    "accumulation": batches([(1, 1), (1, 2), (1, 4), (1, 8), (1, 16)]),
    "threads": vary(SMALL, "threads", "--offload-cpu-threads", (4, 8, 12, 16)),
    "subgroup": vary(SMALL, "subgroup", "--offload-subgroup-numel", [n * 10**6 for n in (10, 30, 100, 300, 1000)]),
    "budgets": vary(AUTO, "budget", "--offload-device-budget-gib", BUDGETS),
    "followed": followed(),
    "sizes": [
        R0,
        replace(R0, name="paper-7b", shape="paper-7b", iterations=10, expected_s=60),
        R0,
        replace(R0, name="paper-8.3b", shape="paper-8.3b", iterations=10, expected_s=80),
        R05,
    ],
}

SMOKE = vary(
    replace(SMALL, shape="tiny", iterations=3, words=R0.words + " --offload-subgroup-numel 65536"),
    "stride",
    "--offload-stride",
    (2,),
)


def error(record: Record) -> float | None:
    """Return by what part of the measured time the predicted one, until parameters are in place, was off."""
    predicted, measured = record.get("predicted_in_place_ms"), record.get("in_place_ms")
    return (predicted - measured) / measured if predicted and measured else None


def _cell(record: Record, name: str) -> str:
    predicted, measured = record.get(f"predicted_{name}"), record.get(name)
    if measured is None:
        return ""
    return f"{measured}" if not predicted else f"{predicted:.2f} / {measured:.2f}"


def report(part: str, records: Sequence[Record]) -> list[str]:
    """Return the part's table, then a line on its predictions."""
    lines = [
        f"## {part}",
        "Pairs are predicted / measured. In place: from the norm until all parameters are; rates count the last flush.",
        "",
        "| run | iteration, ms | in place, ms | G parameters/s | bound | peak GPU, GiB | host state, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        if "failed" in record:
            lines.append(f"| {record['name']} | failed: {record['failed'][-160:]} | | | | | |")
            continue
        bound = record.get("bound")
        bound_text = f"{bound['lane']} {100 * bound['share']:.0f} %" if bound else ""
        cells = [_cell(record, name) for name in ("in_place_ms", "gpu_gib")]
        cells.append(f"{record.get('predicted_host_gib', 0):.2f} / {record['state_gib']['host']:.2f}")
        rate = record.get("update_g_per_s", "")
        lines.append(
            f"| {record['name']} | {record['iteration_ms']} | {cells[0]} | {rate} | {bound_text} | {cells[1]} | "
            f"{cells[2]} |"
        )
    return [*lines, *errors_line(records)]


def errors_line(records: Sequence[Record]) -> list[str]:
    """Return one line on how far predicted update times were off, or none."""
    errors = [abs(e) for e in (error(record) for record in records) if e is not None]
    if not errors:
        return []
    middle, worst = 100 * statistics.median(errors), 100 * max(errors)
    return [f"predicted update: off by {middle:.1f} % (median) and {worst:.1f} % (most) over {len(errors)} runs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; a comma between")
    add_session_options(parser)
    options = parser.parse_args()
    parts = {"smoke-sweep": SMOKE} if options.smoke else {name: PARTS[name] for name in options.part.split(",")}
    seen: list[Record] = []

    def report_all(part: str, records: Sequence[Record]) -> list[str]:
        seen.extend(records)
        total = errors_line(seen) if len(parts) > 1 else []
        return [*report(part, records), *(f"all parts so far, {line}" for line in total)]

    return run_parts(parts, options, report_all)


if __name__ == "__main__":
    sys.exit(main())
