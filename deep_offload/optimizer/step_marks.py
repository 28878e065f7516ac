"""Where the training loop stands within a step: marks on its stream, for traces. Nothing is marked unless asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_offload.plan.ops import Op, OpKind
from deep_offload.plan.timeline import BACKWARD, FORWARD, NORM, Phase, Span
from deep_offload.runtime.lanes import Completion, Device

_END = ""
_OP = Op(OpKind.GRADS_READY)
"""Of no run: a mark's completion only carries a time."""
_ISSUED = threading.Event()
_ISSUED.set()


@dataclass(frozen=True, slots=True)
class Mark:
    """From here on the loop does `kind` for a micro-batch. allocated: bytes that torch's allocator gave out; None: not
    asked."""

    kind: str
    micro_batch: int
    completion: Completion
    allocated: int | None


class StepMarks:
    """The marks of the step that is under way. Forward passes of an evaluation are no step's and leave none."""

    def __init__(self, lanes: Device, device: torch.device) -> None:
        self._lanes, self._device = lanes, device
        self._marks: list[Mark] = []
        self._is_on = self._in_step = False
        self._num_passes: dict[int, int] = {}

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Mark every step from now on: forward and backward passes of these model chunks."""
        if self._is_on:
            return
        self._is_on = True
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(self._before_forward(number), prepend=True)
            # First, so that what the loop waits for behind its forward pass is no part of it.
            chunk.register_forward_hook(self._after_forward(number), prepend=True)

    def begin(self) -> None:
        """A step begins; what was marked of one that was given up is forgotten."""
        self._marks, self._num_passes, self._in_step = [], {}, self._is_on

    def end_of_backward(self) -> None:
        """All gradients are final: what follows is their norm."""
        self._mark(NORM, -1)
        self._in_step = False

    def take(self) -> tuple[Mark, ...]:
        """The marks of the step whose update begins now."""
        marks, self._marks = tuple(self._marks), []
        return marks

    def _mark(self, kind: str, micro_batch: int) -> None:
        if not self._in_step:
            return
        completion = Completion(_OP, _ISSUED)
        self._lanes.mark_main(completion)
        is_asked = kind != _END and self._device.type == "cuda"
        allocated = _allocated_bytes(self._device) if is_asked else None
        self._marks.append(Mark(kind, micro_batch, completion, allocated))

    def _before_forward(self, chunk: int) -> Callable[..., None]:
        def hook(*_unused: Any) -> None:
            if self._in_step:
                self._mark(FORWARD, self._num_passes.get(chunk, 0))

        return hook

    def _after_forward(self, chunk: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if not self._in_step:
                return
            number = self._num_passes.get(chunk, 0)
            self._num_passes[chunk] = number + 1
            self._mark(_END, number)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _grad: self._mark(BACKWARD, number))

        return hook


def _allocated_bytes(device: torch.device) -> int:
    """As torch.cuda.memory_allocated, which makes a flat dictionary of some 200 counters for each call."""
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


def phases_of(marks: Sequence[Mark], spans: Sequence[Span], norm_end: float) -> tuple[Phase, ...]:
    """Phases between marks, whose times are the spans'; the last ends when the norm is known."""
    ends = [*(span.end for span in spans[1:]), norm_end]
    return tuple(
        Phase(mark.kind, mark.micro_batch, span.end, end)
        for mark, span, end in zip(marks, spans, ends)
        if mark.kind != _END
    )
