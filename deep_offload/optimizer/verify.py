"""--offload-verify-interval: in a running job, prove on one subgroup at a time that both sides agree bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_offload.kernels import reference
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER


class UpdateMismatch(RuntimeError):
    """CPU and GPU made different values of the same update: a fault of the machine, or of a kernel."""


@dataclass(frozen=True, slots=True)
class _Before:
    """Copies of one subgroup as the update found it: fp32 state and gradient on the side that does not update it."""

    subgroup: int
    state: dict[str, torch.Tensor]
    grad: torch.Tensor


class UpdateCheck:
    """Repeats every `interval`-th step's update of one subgroup on the other side, each time another subgroup's.

    It works on copies, 12 bytes a parameter and the gradient, so that training is not touched. Call `before` when
    gradients are final and nothing is updated yet, `after` when the update is with the lanes.
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
        side = engine.other_side(i)
        state = {name: values.to(side, copy=True) for name, values in engine.read_state(i).items()}
        self._before = _Before(i, state, engine.read_grad(i).to(side, copy=True))

    def after(self, step: int) -> None:
        """Compare, if `before` kept something. Raises UpdateMismatch."""
        before, self._before = self._before, None
        if before is None:
            return
        engine, i = self._engine, before.subgroup
        engine.repeat_update(i, before.state, before.grad)
        engine.synchronize()  # read after write: this step's update and flush
        found = engine.read_state(i)
        weight = engine.read_weight(i, 0, engine.layout.subgroups[i].numel)
        for name in (MASTER, EXP_AVG, EXP_AVG_SQ):
            _compare(name, i, step, found[name], before.state[name])
        _compare("parameter", i, step, weight, reference.round_to(before.state[MASTER], weight.dtype))
        self.num_checks += 1


def _compare(name: str, i: int, step: int, found: torch.Tensor, repeated: torch.Tensor) -> None:
    whole = {2: torch.int16, 4: torch.int32}[found.element_size()]
    differ = found.view(whole) != repeated.to(found.device).view(whole)
    if bool(differ.any()):
        first = int(differ.nonzero()[0])
        raise UpdateMismatch(
            f"--offload-verify-interval: {name} of subgroup {i} differs between CPU and GPU in {int(differ.sum())} of "
            f"{differ.numel()} elements after step {step}, first at {first} ({found[first].item():.9g} trained, "
            f"{repeated[first].item():.9g} repeated): stop using this machine until its memory and GPU are tested, and "
            "go on from the last checkpoint"
        )
