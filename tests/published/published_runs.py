"""The published runs beside what the simulator says of them. As a script it prints the tables of docs/simulator.md."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.published import (
    FitRuns,
    PublishedRates,
    PublishedRun,
    fit_rates,
    predicted_backward_seconds,
    predicted_step_seconds,
)

DATA = Path(__file__).with_name("published_steps.csv")
MACHINES = ("h100x4", "a100x4")


@dataclass(frozen=True)
class Row:
    """One published run; times in ms, forward and backward 0 where only the rate of the update was published."""

    machine: str
    nominal: str
    run: PublishedRun
    forward: float
    backward: float
    step: float
    source: str

    @property
    def name(self) -> str:
        stride = "none" if self.run.stride is None else str(self.run.stride)
        flush = "" if self.run.is_flush_async else ", blocking flush"
        return f"{self.machine} {self.nominal}B, offloaded {self.run.offloaded:g}, stride {stride}{flush}"

    @property
    def is_fitted(self) -> bool:
        """Whether the rates were fitted to this very run."""
        return self is _fit_row(self.machine, self.run.stride) if self.run.stride in (None, 2, 10) else False


@cache
def rows() -> tuple[Row, ...]:
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return tuple(_row(line) for line in csv.DictReader(lines))


def _row(line: dict[str, str]) -> Row:
    run = PublishedRun(
        numel=int(float(line["real_billions"]) * 1e9) // 4,
        subgroups=int(line["subgroups"]),
        stride=int(line["stride"]) if line["stride"] else None,
        offloaded=float(line["offload_ratio"]),
        is_flush_async=line["async_flush"] == "1",
    )
    times = (float(line[name] or 0) for name in ("forward_ms", "backward_ms", "step_ms"))
    return Row(line["machine"], line["nominal_billions"], run, *times, line["source"])


def _fit_row(machine: str, stride: int | None, is_flush_async: bool = True) -> Row:
    """The 20B run that a rate is fitted to; logs before figures."""
    found = [
        row
        for row in rows()
        if (row.machine, row.nominal, row.run.offloaded) == (machine, "20", 1.0)
        and (row.run.stride, row.run.is_flush_async) == (stride, is_flush_async)
    ]
    return min(found, key=lambda row: row.source.startswith("figure"))


@cache
def rates(machine: str) -> PublishedRates:
    plain, two, ten = (_fit_row(machine, stride) for stride in (None, 2, 10))
    blocking = _fit_row(machine, None, False)
    runs = FitRuns(
        plain.run.numel,
        plain.run.subgroups,
        plain.step / 1e3,
        two.step / 1e3,
        ten.step / 1e3,
        blocking.backward / 1e3,
        plain.backward / 1e3,
    )
    return fit_rates(runs, BUILT_IN_PROFILES[machine])


@cache
def _step_ms(machine: str, run: PublishedRun) -> float:
    return 1e3 * predicted_step_seconds(run, rates(machine), BUILT_IN_PROFILES[machine])


def step_ms(row: Row) -> float:
    """The predicted update in ms; how gradients came to the host does not matter to it."""
    run = row.run
    return _step_ms(row.machine, PublishedRun(run.numel, run.subgroups, run.stride, run.offloaded))


def error(row: Row) -> float:
    return step_ms(row) / row.step - 1


def flush_pairs() -> list[tuple[Row, Row]]:
    """(blocking, asynchronous) runs without interleaving that differ in nothing else."""
    return [
        (a, b)
        for a in rows()
        for b in rows()
        if not a.run.is_flush_async
        and b.run.is_flush_async
        and b.backward
        and (a.machine, a.nominal, a.run.offloaded, a.run.stride, a.source)
        == (b.machine, b.nominal, b.run.offloaded, b.run.stride, b.source)
    ]


def flush_gain(blocking: Row, asynchronous: Row) -> tuple[float, float]:
    """(published, predicted) ratio of iteration times, blocking over asynchronous.

    The asynchronous backward pass is taken as the compute; everything else of the iteration is the same.
    """
    machine = BUILT_IN_PROFILES[blocking.machine]
    compute = asynchronous.backward / 1e3
    backward = 1e3 * predicted_backward_seconds(blocking.run, rates(blocking.machine), machine, compute)
    rest = asynchronous.forward + step_ms(asynchronous)
    published = (blocking.forward + blocking.backward + blocking.step) / (
        asynchronous.forward + asynchronous.backward + asynchronous.step
    )
    return published, (backward + rest) / (asynchronous.backward + rest)


if __name__ == "__main__":
    for machine in MACHINES:
        print(machine, rates(machine))
    for row in rows():
        note = "fitted" if row.is_fitted else ""
        print(f"| {row.name} | {row.step:.0f} | {step_ms(row):.0f} | {100 * error(row):+.1f} % | {note} |")
    for pair in flush_pairs():
        print(f"| {pair[0].name} | {flush_gain(*pair)[0]:.2f} | {flush_gain(*pair)[1]:.2f} |")
