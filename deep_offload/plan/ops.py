"""Operations of an iteration's offload work, and the plan that holds them."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Lane(enum.Enum):
    """One first-in first-out resource. MAIN is the training loop itself: its thread and its compute stream."""

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python: plans look members up by the hundred thousand

    MAIN = "main"
    CPU = "cpu"
    GPU = "gpu"
    H2D = "h2d"
    D2H = "d2h"


class OpKind(enum.Enum):
    """What an operation does; its lane follows from it."""

    __hash__ = object.__hash__

    GRADS_READY = "grads_ready"
    """External: this iteration's gradient of one subgroup is final in the device's gradient buffer."""
    GRAD_FLUSH = "grad_flush"
    """Gradient to the pinned host buffer of a subgroup that the CPU updates."""
    PREFETCH = "prefetch"
    """Optimizer state of a subgroup from host memory into a staging slot."""
    NORM_READY = "norm_ready"
    """External: the gradient norm, hence the scale of every update, is known and finite."""
    UPDATE_CPU = "update_cpu"
    UPDATE_GPU = "update_gpu"
    FLUSH = "flush"
    """Updated optimizer state from a staging slot back to host memory."""
    PARAM_H2D = "param_h2d"
    """Updated parameters of a subgroup from host memory to the device."""
    GRADS_REUSABLE = "grads_reusable"
    """External: the training loop may overwrite the gradient buffer."""
    PARAMS_NEEDED = "params_needed"
    """External: the training loop is about to read the parameters of a subgroup."""


LANE_OF = {
    OpKind.GRADS_READY: Lane.MAIN,
    OpKind.GRAD_FLUSH: Lane.D2H,
    OpKind.PREFETCH: Lane.H2D,
    OpKind.NORM_READY: Lane.MAIN,
    OpKind.UPDATE_CPU: Lane.CPU,
    OpKind.UPDATE_GPU: Lane.GPU,
    OpKind.FLUSH: Lane.D2H,
    OpKind.PARAM_H2D: Lane.H2D,
    OpKind.GRADS_REUSABLE: Lane.MAIN,
    OpKind.PARAMS_NEEDED: Lane.MAIN,
}

NO_SUBGROUP = -1


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work on one lane.

    after: indices of earlier ops of the same plan that must be done first. after_previous: indices of ops of the
    iteration before, which ran the same plan. slot: the staging slot it uses, or None.
    """

    kind: OpKind
    subgroup: int = NO_SUBGROUP
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    slot: int | None = None

    @property
    def lane(self) -> Lane:
        return LANE_OF[self.kind]

    @property
    def label(self) -> str:
        """Short name for logs and drawings, such as `prefetch[5]`."""
        return self.kind.value if self.subgroup == NO_SUBGROUP else f"{self.kind.value}[{self.subgroup}]"

    def __str__(self) -> str:
        slot = "" if self.slot is None else f" slot {self.slot}"
        after = "" if not self.after else " after " + ",".join(map(str, self.after))
        previous = "" if not self.after_previous else " after_previous " + ",".join(map(str, self.after_previous))
        return f"{self.label} @{self.lane.value}{slot}{after}{previous}"


_OP_TEXT = re.compile(
    r"(?P<kind>\w+?)(\[(?P<subgroup>\d+)\])? @(?P<lane>\w+)( slot (?P<slot>\d+))?"
    r"( after (?P<after>[\d,]+))?( after_previous (?P<previous>[\d,]+))?"
)


def parse_op(text: str) -> Op:
    """The inverse of `str(op)`. Raises ValueError naming the text."""
    match = _OP_TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no operation, expected for example 'prefetch[5] @h2d slot 1 after 3,4'")
    try:
        kind = OpKind(match["kind"])
    except ValueError as error:
        raise ValueError(
            f"{match['kind']!r} is no kind of operation, allowed are {[k.value for k in OpKind]}"
        ) from error
    if match["lane"] != LANE_OF[kind].value:
        raise ValueError(f"{text!r} names lane {match['lane']}, but {kind.value} runs on {LANE_OF[kind].value}")
    return Op(
        kind,
        NO_SUBGROUP if match["subgroup"] is None else int(match["subgroup"]),
        _indices(match["after"]),
        _indices(match["previous"]),
        None if match["slot"] is None else int(match["slot"]),
    )


def _indices(text: str | None) -> tuple[int, ...]:
    return () if text is None else tuple(int(i) for i in text.split(","))


class Place(enum.Enum):
    """Where a subgroup's optimizer state lives and who updates it."""

    __hash__ = object.__hash__

    CPU = "cpu"
    """Home on the host, updated there."""
    GPU = "gpu"
    """Home on the host, staged in a slot while the GPU updates it."""
    RESIDENT = "resident"
    """Home on the GPU, updated there."""


Placement = tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The offload work of one iteration, in the order in which each lane takes it."""

    placement: Placement
    num_slots: int
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return "\n".join(f"{index:4d} {op}" for index, op in enumerate(self.ops))
