"""Results that cannot be right (--rerun-mode validate_results): the step is computed again before it changes anything.

The rules and exit codes are those of megatron-core's rerun state machine; that one calls a GPU for its votes, pickles
objects of its own into checkpoints, and cannot go on after a transient fault, so the code is ours:

1. A loss or gradient norm is not finite: the same micro-batches with the same random numbers, on the same GPU.
2. It does not come again: a transient fault. A checkpoint of the state before the step, code 17.
3. It comes again: a checkpoint that remembers the step and its GPUs, code 16. Resume on other GPUs.
4. There the step is the first of all. On the same GPU: code 16 again. Otherwise code 17: if the result is the same it
   comes from model or data, else the first GPU is faulty.

A loss that jumps (--check-for-spiky-loss) is computed again and reported; training goes on.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.ranks import from_all_ranks
from deep_offload.optimizer.small_copies import to_host
from megatron.training.checkpointing_rng import rng_entry, set_rng
from megatron.training.exit_codes import DISAMBIGUATE, INVALID_RESULT
from megatron.training.train_step import (
    ForwardStep,
    Gradients,
    Losses,
    MicroBatches,
    StepResult,
    apply_gradients,
    compute_gradients,
    mean_losses,
)
from megatron.training.votes import highest

SPIKE_FACTOR = 10.0
"""A loss this many times the largest one of the sample is a spike."""

SPIKE_SAMPLES = 100
"""Losses that make the sample, from the start of the process."""

_FINE, _SPIKE, _NOT_FINITE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run that met a result which cannot be right.

    code: exit code; saves: whether a checkpoint of the state before the step belongs to it.
    """

    code: int
    cause: str
    saves: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A result that came twice on one GPU: of which step, what it was, and (rank, host, device) of who may be at fault.

    Saved in checkpoints as a plain dictionary.
    """

    iteration: int
    what: str
    places: tuple[tuple[int, str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain Python values."""
        return {"iteration": self.iteration, "what": self.what, "places": [list(place) for place in self.places]}

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Suspect:
        """Inverse of `as_dict`."""
        places = tuple((int(rank), str(host), str(device)) for rank, host, device in saved["places"])
        return cls(int(saved["iteration"]), str(saved["what"]), places)

    def names(self) -> str:
        """Return who is suspected, in words."""
        return ", ".join(f"rank {rank} ({host}, {device})" for rank, host, device in self.places)


class ReplayedBatches(Iterator[Any]):
    """An iterator that can give the micro-batches of the present step once more."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: list[Any] = []
        self._position: int | None = None

    def begin(self) -> None:
        """A new step: forget the last one's."""
        self._kept, self._position = [], None

    def rewind(self) -> None:
        """Give what came since `begin` again."""
        self._position = 0

    def __next__(self) -> Any:
        if self._position is None:
            self._kept.append(next(self._source))
            return self._kept[-1]
        assert self._position < len(self._kept), "a step that is computed again reads what it read the first time"
        self._position += 1
        return self._kept[self._position - 1]


def place_of(device: torch.device) -> tuple[str, str]:
    """Return this host's name and what tells its accelerators apart, whatever their order."""
    if device.type != "cuda":
        return platform.node(), device.type
    properties = torch.cuda.get_device_properties(device)
    return platform.node(), f"GPU {getattr(properties, 'uuid', device.index)}"


class Rerun:
    """Steps whose results are looked at before their update. Every rank takes part in every call of `step`."""

    def __init__(
        self, mode: str, checks_finite: bool, checks_spikes: bool, can_save: bool, report: Callable[[str], None]
    ) -> None:
        """mode: --rerun-mode, not `disabled`; report: prints a line on the rank it is called on."""
        self._mode, self._can_save, self._print = mode, can_save, report
        self._checks_finite, self._checks_spikes = checks_finite, checks_spikes
        self._largest, self._num_seen = 0.0, 0
        self._rng: Any = None
        self.suspect: Suspect | None = None
        """What a checkpoint remembers: found in this run, or by the one that it goes on from."""
        self.verdict: Verdict | None = None
        """Why the run ends here; None while it goes on."""

    def iterators(self, data: list[Any]) -> list[Any]:
        """Return iterators whose steps can be computed again; None stays."""
        return [None if iterator is None else ReplayedBatches(iterator) for iterator in data]

    def step(
        self,
        number: int,
        forward: ForwardStep,
        data: list[Any],
        chunks: list[DistributedDataParallel],
        optimizer: DeepOffloadOptimizer,
        batches: MicroBatches,
    ) -> StepResult:
        """Do step `number`. With a `verdict` afterwards nothing was updated, and the step is still to be done."""
        for iterator in data:
            if iterator is not None:
                iterator.begin()
        self._rng = rng_entry().data
        compute = partial(compute_gradients, forward, data, chunks, optimizer, batches)
        apply = partial(apply_gradients, chunks, optimizer)
        again = partial(self._again, compute, optimizer, data)
        suspect, self.suspect = self.suspect, None
        if suspect is not None and suspect.iteration == number:
            self.suspect = suspect
            return self._second_opinion(suspect, compute, optimizer)
        first = compute()
        if self._mode == "report_stats":
            norm = optimizer.get_grad_norm()
            optimizer.drop_gradients()
            second = again()
            self._say_differences(number, first, second, norm, optimizer.get_grad_norm())
            return apply(second)
        grade = self._grade(first)
        result = None
        if grade == _FINE:
            result = apply(first)
            if not (result.is_skipped and self._checks_finite):
                return result
        else:
            optimizer.drop_gradients()
        norm = None if result is None else result.grad_norm
        found = self._who(number, first, norm)
        self._say(f"WARNING: iteration {number}: {found.what}, of {found.names()}: the step is computed again")
        second = again()
        if grade == _SPIKE:
            kind = "again" if self._grade(second) == _SPIKE else "now, so the first was a transient fault"
            self._say(f"WARNING: iteration {number}, computed again: {_words(second)} {kind}; training goes on")
            return apply(second)
        return self._end_first(found, second, optimizer)

    # -- what was seen ------------------------------------------------------------------------------------------------

    def _again(self, compute: Callable[[], Gradients], optimizer: DeepOffloadOptimizer, data: list[Any]) -> Gradients:
        """Compute the step's gradients once more, from the same batches and random numbers."""
        for iterator in data:
            if iterator is not None:
                iterator.rewind()
        set_rng(self._rng)
        return compute()

    def _grade(self, gradients: Gradients) -> int:
        """Return the worst that any rank says about the losses. Collective."""
        losses = _losses(gradients)
        grade = _FINE
        if self._checks_finite and not all(map(math.isfinite, losses.values())):
            grade = _NOT_FINITE
        elif self._checks_spikes and any(self._is_spike(abs(loss)) for loss in losses.values()):
            grade = _SPIKE
        return highest(grade, _own_device())

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return False
        if self._num_seen < SPIKE_SAMPLES:
            self._num_seen += 1
            self._largest = max(self._largest, loss)
            return False
        return loss >= SPIKE_FACTOR * self._largest

    def _who(self, number: int, gradients: Gradients, norm: float | None) -> Suspect:
        """Return what is wrong, and which ranks it may come from: those whose own losses are not finite, else all."""
        own = [value for report in gradients.reports for value in report.values()]
        is_bad = not all(bool(torch.isfinite(value).all()) for value in own)
        what = f"grad norm is {norm}" if norm is not None else _words(gradients)
        everyone = from_all_ranks((is_bad, what if gradients.totals else "", *place_of(_own_device())))
        any_bad = any(bad for bad, *_ in everyone)
        places = [(rank, host, name) for rank, (bad, _, host, name) in enumerate(everyone) if bad or not any_bad]
        return Suspect(number, next(said for _, said, _, _ in reversed(everyone) if said), tuple(places))

    def _is_bad(self, gradients: Gradients, optimizer: DeepOffloadOptimizer) -> bool:
        """Whether a result is not finite, losses and gradients; updates nothing. Collective."""
        bad_loss = self._grade(gradients) == _NOT_FINITE
        return not math.isfinite(optimizer.get_grad_norm()) or bad_loss

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def _end_first(self, found: Suspect, second: Gradients, optimizer: DeepOffloadOptimizer) -> StepResult:
        start = f"iteration {found.iteration}: {found.what}"
        if not self._is_bad(second, optimizer):
            cause = f"{start}, and is finite when computed again on the same GPU: a transient fault of {found.names()}"
            return self._end(Verdict(INVALID_RESULT, cause, True), second, optimizer)
        if not self._can_save:
            cause = f"{start}, twice on the same GPU; without --save no other GPU can be asked"
            return self._end(Verdict(INVALID_RESULT, cause, False), second, optimizer)
        self.suspect = found
        cause = f"{start}, twice on the same GPU: resume on other GPUs than those of {found.names()} to find the cause"
        return self._end(Verdict(DISAMBIGUATE, cause, True), second, optimizer)

    def _second_opinion(
        self, suspect: Suspect, compute: Callable[[], Gradients], optimizer: DeepOffloadOptimizer
    ) -> StepResult:
        """The step that an earlier run could not explain."""
        everyone = from_all_ranks((dist.get_rank(), *place_of(_own_device())))
        gradients = compute()
        start = f"iteration {suspect.iteration}: {suspect.what}"
        go_on = "--rerun-mode disabled goes on from the checkpoint"
        if any(place in suspect.places for place in everyone):
            cause = f"{start}, and this is the same GPU: resume on other GPUs than those of {suspect.names()}"
            return self._end(Verdict(DISAMBIGUATE, cause, False), gradients, optimizer)
        if self._is_bad(gradients, optimizer):
            cause = f"{start}, on another GPU too: it comes from data, settings or code; {go_on} without the step"
        else:
            cause = f"{start}, but not on another GPU: keep those of {suspect.names()} out; {go_on}"
        return self._end(Verdict(INVALID_RESULT, cause, False), gradients, optimizer)

    def _end(self, verdict: Verdict, gradients: Gradients, optimizer: DeepOffloadOptimizer) -> StepResult:
        optimizer.drop_gradients()
        set_rng(self._rng)  # a checkpoint is of the state before the step
        self.verdict = verdict
        return StepResult(_losses(gradients), True, math.nan, None)

    # -- words --------------------------------------------------------------------------------------------------------

    def _say_differences(self, number: int, first: Gradients, second: Gradients, *norms: float) -> None:
        pairs = [(name, value, _losses(second)[name]) for name, value in _losses(first).items()]
        said = [f"{name} differs by {_relative(a, b):.3E}" for name, a, b in (*pairs, ("grad norm", *norms))]
        self._say(f"iteration {number} computed twice: {', '.join(said)} (relative)")

    def _say(self, line: str) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:  # which has the losses
            self._print(line)


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _losses(gradients: Gradients) -> Losses:
    return mean_losses(gradients.totals, to_host(list(gradients.totals.values())))


def _words(gradients: Gradients) -> str:
    return ", ".join(f"{name} is {loss:.6g}" for name, loss in _losses(gradients).items())


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf
