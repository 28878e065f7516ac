"""What a demo run printed and traced, as numbers, and whether that is what the demo promises. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.draw_timeline import read_timeline
from tools.plot_loss import read_losses

MIN_LOSS_FALL = 2.0
"""Nats that the validation loss must fall from its value before the first step."""

LANES = ("h2d", "d2h", "cpu", "gpu")
TRAFFIC = re.compile(r"^> moved by lane (\w+): (?:[^(\n]*\()?(\d+) (?:bytes|params)\)?$", re.MULTILINE)
NO_GPU = re.compile(r"^> training on the CPU\b", re.MULTILINE)
DIGEST = re.compile(r"^state digest: (sha256:[0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    validation: (iteration, loss in nats). traffic: what the run counted since its start, by lane: bytes over the link
    in each direction, parameters updated by each side. digest: of weights and optimizer state, None where none was
    printed. operations: of each kind in the traced step. has_gpu: False where the CPU stood in for one.
    """

    validation: tuple[tuple[int, float], ...]
    traffic: dict[str, int]
    digest: str | None
    operations: dict[str, int]
    has_gpu: bool

    @property
    def num_subgroups(self) -> int:
        return self.operations.get("update_cpu", 0) + self.operations.get("update_gpu", 0)

    @property
    def loss_fall(self) -> float:
        """Nats between the first validation and the last; 0 where there are not two."""
        return self.validation[0][1] - self.validation[-1][1] if len(self.validation) > 1 else 0.0


def read_outcome(log: str, trace: Path) -> Outcome:
    """Return the outcome from the run's output and its trace file. Raises ValueError where the trace is no trace."""
    if not trace.exists():
        raise ValueError(f"the run wrote no trace to {trace}, so there is no step to draw")
    operations: dict[str, int] = {}
    for span in read_timeline(trace).spans:
        operations[span.op.kind.value] = operations.get(span.op.kind.value, 0) + 1
    digests = DIGEST.findall(log)
    return Outcome(
        validation=read_losses(log).validation,
        traffic={name: int(amount) for name, amount in TRAFFIC.findall(log)},
        digest=digests[-1] if digests else None,
        operations=operations,
        has_gpu=NO_GPU.search(log) is None,
    )


def check_outcome(outcome: Outcome) -> list[str]:
    """Return what the demo promises and the run did not do, each a part of a sentence."""
    problems = []
    if not outcome.validation or outcome.validation[0][0] != 0:
        problems.append("no validation loss was printed before the first step")
    elif not outcome.loss_fall > MIN_LOSS_FALL:  # a NaN is no fall either
        problems.append(
            f"the validation loss fell by {outcome.loss_fall:.2f} nats instead of more than {MIN_LOSS_FALL}"
        )
    for lane in LANES:
        if outcome.traffic.get(lane, 0) <= 0:
            problems.append(f"nothing went through lane {lane}")
    for kind, side in (("update_cpu", "CPU"), ("update_gpu", "GPU")):
        if not outcome.operations.get(kind):
            problems.append(f"the {side} side updated no subgroup in the traced step")
    if outcome.digest is None:
        problems.append("no state digest was printed")
    return problems


def summary_lines(outcome: Outcome, training_seconds: float) -> list[str]:
    """Return the table that the demo ends with."""
    lines = [f"training took {training_seconds:.0f} s"]
    if len(outcome.validation) > 1:
        (_, first), (iteration, last) = outcome.validation[0], outcome.validation[-1]
        lines.append(
            f"validation loss {first:.3f} -> {last:.3f} after {iteration} steps ({outcome.loss_fall:.2f} nats)"
        )
    titles = {"h2d": "host to device", "d2h": "device to host", "cpu": "updated by CPU", "gpu": "updated by GPU"}
    for lane, title in titles.items():
        amount = outcome.traffic.get(lane, 0)
        unit = f"{amount / 1e9:.2f} GB moved" if lane in ("h2d", "d2h") else f"{amount / 1e6:.0f} M parameter updates"
        lines.append(f"{lane:>4}  {title:<15} {unit:>24}  {outcome_count(outcome, lane)}")
    if not outcome.has_gpu:
        lines.append("no GPU: its side was a second set of buffers in host memory, worked on by threads of their own")
    lines.append(f"state digest {outcome.digest}")
    return lines


def outcome_count(outcome: Outcome, lane: str) -> str:
    """Return the operations of the traced step on one lane, for people."""
    kinds = {
        "h2d": (("prefetch", "states up"), ("param_h2d", "parameters up")),
        "d2h": (("grad_flush", "gradients down"), ("flush", "states down")),
        "cpu": (("update_cpu", "subgroups a step"),),
        "gpu": (("update_gpu", "subgroups a step"),),
    }[lane]
    return ", ".join(f"{outcome.operations.get(kind, 0)} {what}" for kind, what in kinds)
