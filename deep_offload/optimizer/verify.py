"""--offload-verify-interval: in a running job, prove on one subgroup at a time that both sides agree bit by bit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from deep_offload.kernels import reference
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER
from deep_offload.runtime.arena import ArraySpec, HostArena
from deep_offload.runtime.convert import pieces

_STATE = (MASTER, EXP_AVG, EXP_AVG_SQ)
_PARAMETER = "parameter"
_PIECE_NUMEL = 1 << 24
"""Elements that are copied and compared at a time, on the device: what that takes there stays small."""


class UpdateMismatch(RuntimeError):
    """CPU and GPU made different values of the same update: a fault of the machine, or of a kernel."""


@dataclass(frozen=True, slots=True)
class _Before:
    """Copies of one subgroup as the update found it: fp32 state and gradient on the side that does not update it."""

    subgroup: int
    state: dict[str, torch.Tensor]
    grad: torch.Tensor
    arena: HostArena | None
    """Owns the copies that lie on the host."""


class UpdateCheck:
    """Repeats every `interval`-th step's update of one subgroup on the other side, each time another subgroup's.

    It works on copies, 12 bytes a parameter and the gradient, so that training is not touched: on the device where the
    CPU updates, when no activations are there; else on the host. Call `before` when gradients are final and nothing is
    updated yet, `after` when the update is with the lanes.
    """

    def __init__(self, engine: OffloadEngine, interval: int) -> None:
        """interval: steps from one check to the next, 0 for none."""
        self._engine = engine
        self._interval = interval if engine.layout.subgroups else 0
        self._before: _Before | None = None
        self.num_checks = 0

    def before(self, step: int) -> None:
        """Keep what the check of step `step` (the first is 1) needs, if there is one."""
        if not self._interval or step % self._interval:
            return
        engine = self._engine
        i = (step // self._interval - 1) % len(engine.layout.subgroups)
        engine.synchronize()  # read after write: the flush of the step before
        self.close()
        self._before = kept = self._allocate(i)
        for start, end in self._pieces(i):
            for name, values in engine.read_state(i, start, end, merge_on=engine.device).items():
                kept.state[name][start:end].copy_(values)
        kept.grad.copy_(engine.read_grad(i))

    def after(self, step: int) -> None:
        """Compare, if `before` kept something. Raises UpdateMismatch."""
        before = self._before
        if before is None:
            return
        try:
            self._engine.repeat_update(before.subgroup, before.state, before.grad)
            self._engine.synchronize()  # read after write: this step's update and flush
            for name in (*_STATE, _PARAMETER):
                self._compare(name, step, before)
        finally:
            self.close()
        self.num_checks += 1

    def close(self) -> None:
        """Release the copies, also those that a step which failed has left."""
        before, self._before = self._before, None
        if before is not None and before.arena is not None:
            before.arena.close()

    def _allocate(self, i: int) -> _Before:
        """Room for the copies of subgroup i; on the host in huge pages, pinned where there is a GPU."""
        engine, numel = self._engine, self._engine.layout.subgroups[i].numel
        dtypes = [torch.float32] * len(_STATE) + [engine.read_grad(i).dtype]
        arena = None
        if engine.other_side(i).type == "cpu":
            specs, pin = [ArraySpec(numel, dtype) for dtype in dtypes], engine.device.type == "cuda"
            arena = HostArena(specs, pin=pin, num_threads=engine.settings.num_threads, warn=warnings.warn)
            arrays = list(arena.arrays)
        else:
            arrays = [torch.empty(numel, dtype=dtype, device=engine.device) for dtype in dtypes]
        *state, grad = arrays
        return _Before(i, dict(zip(_STATE, state)), grad, arena)

    def _pieces(self, i: int) -> list[tuple[int, int]]:
        return pieces(self._engine.layout.subgroups[i].numel, _PIECE_NUMEL)

    def _found_and_repeated(self, name: str, before: _Before, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Elements [start, end) as trained and as repeated, on the device."""
        engine, i = self._engine, before.subgroup
        if name == _PARAMETER:
            found = engine.read_weight(i, start, end)
            repeated = reference.round_to(before.state[MASTER][start:end].to(engine.device), found.dtype)
            return found, repeated
        found = engine.read_state(i, start, end, (name,), engine.device)[name]
        return found.to(engine.device), before.state[name][start:end].to(engine.device)

    def _compare(self, name: str, step: int, before: _Before) -> None:
        count = 0
        first: tuple[int, float, float] | None = None
        for start, end in self._pieces(before.subgroup):
            pair = self._found_and_repeated(name, before, start, end)
            found, repeated = (values.view(_whole_number(values)) for values in pair)
            differ = found != repeated
            here = int(differ.sum())
            if here and first is None:
                at = int(differ.nonzero()[0])
                first = start + at, pair[0][at].item(), pair[1][at].item()
            count += here
        if first is not None:
            raise UpdateMismatch(_message(name, step, before, count, *first))


def _whole_number(values: torch.Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[values.element_size()]


def _message(name: str, step: int, before: _Before, count: int, first: int, trained: float, repeated: float) -> str:
    return (
        f"--offload-verify-interval: {name} of subgroup {before.subgroup} differs between CPU and GPU in {count} of "
        f"{before.grad.numel()} elements after step {step}, first at {first} ({trained:.9g} trained, {repeated:.9g} "
        "repeated): stop using this machine until its memory and GPU are tested, and go on from the last checkpoint"
    )
