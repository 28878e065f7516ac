"""The published scheduler of the method as a plan, and rates fitted to its authors' runs. Standard library only.

The authors' logs show what their scheduler does on machines we do not have. As a plan it plays on our simulator, so
their numbers test it: rates come from three runs of one model, everything else is predicted (docs/simulator.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deep_offload.model.cost import StateFormat
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.simulator import simulate
from deep_offload.plan.layout import ShardLayout, ShardSpec, build_layout
from deep_offload.plan.ops import Lane, Op, OpKind, Place, Placement, Plan
from deep_offload.plan.placement import place_by_stride

PUBLISHED_STATE = StateFormat(split_master=False, wire="fp32")
"""12 bytes of state a parameter, gradients upcast to fp32 before they leave the GPU."""

PUBLISHED_RANKS = 4
"""GPUs of a published node, all at work."""

_MOST_ROUNDS = 60
_MOST_DRAM_BYTES_PER_S = 1e18  # of no machine: the fit would go on beyond all numbers
_NO_GUARANTEE = 1e-3
"""Busy rates of a fitted profile as a part of those alone: none is known, so lanes slow down alike."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """What was run. numel: real parameters of one rank; subgroups: pieces of equal size that its state is cut into.

    stride None: no interleaving, the plain ZeRO-3 offload. offloaded: the ratio; the rest stays on the GPU.
    """

    numel: int
    subgroups: int
    stride: int | None
    offloaded: float = 1.0
    is_flush_async: bool = True

    @property
    def layout(self) -> ShardLayout:
        size = -(-self.numel // self.subgroups)
        sizes = [min(size, self.numel - i * size) for i in range(self.subgroups)]
        return build_layout([ShardSpec(n, 2, 2) for n in sizes if n > 0], size)

    @property
    def placement(self) -> Placement:
        num = len(self.layout.subgroups)
        residents = math.ceil(num * (1.0 - self.offloaded) - 1e-9)  # rounded up: so the times of all ratios say
        return place_by_stride(num, self.stride, residents / num)


def published_plan(placement: Placement, *, is_interleaved: bool, is_flush_async: bool = True) -> Plan:
    """One iteration as the published code orders it.

    One set of staging buffers, so a prefetch waits for the flush before it. One host thread: it waits for the prefetch
    before each GPU update, and does nothing else meanwhile. Nothing starts before the norm, nothing outlives the step;
    residents come last. Not interleaved: weights return by a blocking copy, so each CPU update waits for the one before
    it to be back on the GPU. Flush not asynchronous: the backward pass waits for each gradient's way to the host.
    """
    builder = _Builder(placement)
    builder.gradients(is_flush_async)
    builder.update(is_interleaved)
    return builder.finish()


class _Builder:
    """Emits operations in the published order; remembers the index of each."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.ops: list[Op] = []
        self.index: dict[tuple[OpKind, int], int] = {}

    def emit(self, kind: OpKind, i: int = -1, after: tuple[int, ...] = (), slot: int | None = None) -> int:
        self.ops.append(Op(kind, i, tuple(sorted(set(after))), (), slot))
        self.index[kind, i] = len(self.ops) - 1
        return len(self.ops) - 1

    def gradients(self, is_flush_async: bool) -> None:
        blocked: tuple[int, ...] = ()
        flushes = []
        for i in reversed(range(len(self.placement))):
            ready = self.emit(OpKind.GRADS_READY, i, blocked)
            if self.placement[i] is Place.CPU:
                flushes.append(self.emit(OpKind.GRAD_FLUSH, i, (ready,)))
                blocked = () if is_flush_async else (flushes[-1],)
        self.emit(OpKind.NORM_READY, after=tuple(flushes))

    def update(self, is_interleaved: bool) -> None:
        norm = self.index[OpKind.NORM_READY, -1]
        streamed = [i for i, place in enumerate(self.placement) if place is Place.GPU]
        if streamed:
            self.emit(OpKind.PREFETCH, streamed[0], (norm,), 0)
        host_waits: tuple[int, ...] = ()
        for i, place in enumerate(self.placement):
            if place is Place.CPU:
                grad = self.index[OpKind.GRAD_FLUSH, i]
                update = self.emit(OpKind.UPDATE_CPU, i, (norm, grad, *host_waits))
                upload = self.emit(OpKind.PARAM_H2D, i, (update,))
                host_waits = () if is_interleaved else (upload,)
            elif place is Place.GPU:
                staged = self.index[OpKind.PREFETCH, i]
                update = self.emit(OpKind.UPDATE_GPU, i, (norm, staged), 0)
                flush = self.emit(OpKind.FLUSH, i, (update,), 0)
                following = streamed.index(i) + 1
                if following < len(streamed):
                    self.emit(OpKind.PREFETCH, streamed[following], (flush,), 0)
                host_waits = (staged,)
        last_cpu = [n for (kind, _), n in self.index.items() if kind in (OpKind.UPDATE_CPU, OpKind.PREFETCH)]
        for i, place in enumerate(self.placement):
            if place is Place.RESIDENT:
                self.emit(OpKind.UPDATE_GPU, i, (norm, *last_cpu[-1:]))

    def finish(self) -> Plan:
        done = tuple(n for n, op in enumerate(self.ops) if op.lane is not Lane.MAIN)
        end = self.emit(OpKind.GRADS_REUSABLE, after=done)
        for i in range(len(self.placement)):
            self.emit(OpKind.PARAMS_NEEDED, i, (end,))
        return Plan(self.placement, 1, tuple(self.ops))


@dataclass(frozen=True, slots=True)
class PublishedRates:
    """What is fitted to a machine. Parameters/s of one rank, but for dram_bytes_per_s.

    cpu_adam: CPU update; weight_return: cast and blocking copy of updated weights in the plain offload; blocking_flush:
    allocate, convert and copy a gradient while the backward pass waits; dram_bytes_per_s: host memory of one rank.
    """

    cpu_adam: float
    dram_bytes_per_s: float
    weight_return: float
    blocking_flush: float

    def profile(self, machine: HardwareProfile, run: PublishedRun) -> HardwareProfile:
        """The machine with these rates, as this run uses it; link and GPU stay the published ones."""
        h2d = machine.h2d_both_bytes_per_s if run.stride is not None else 2 * self.weight_return
        d2h = machine.d2h_both_bytes_per_s
        values = {
            "cpu_adam_fp32_params_per_s": self.cpu_adam,
            "cpu_adam_fp32_busy_params_per_s": self.cpu_adam * _NO_GUARANTEE,
            "dram_bytes_per_s": self.dram_bytes_per_s,
            "host_dram_bytes_per_s": self.dram_bytes_per_s * PUBLISHED_RANKS,
        }
        for lane, rate in (("h2d", h2d), ("d2h", d2h)):
            values[f"{lane}_bytes_per_s"] = values[f"{lane}_both_bytes_per_s"] = rate
            values[f"{lane}_busy_bytes_per_s"] = rate * _NO_GUARANTEE
        return replace(machine, **values)


def predicted_step_seconds(run: PublishedRun, rates: PublishedRates, machine: HardwareProfile) -> float:
    """Seconds from the norm to the end of the update."""
    plan = published_plan(run.placement, is_interleaved=run.stride is not None)
    played = simulate(plan, run.layout, PUBLISHED_STATE, rates.profile(machine, run), num_ranks=PUBLISHED_RANKS)
    return played.timeline.update_seconds


def predicted_backward_seconds(
    run: PublishedRun, rates: PublishedRates, machine: HardwareProfile, compute_seconds: float
) -> float:
    """Seconds of a backward pass that computes for `compute_seconds`, until its last gradient is on the host."""
    profile = rates.profile(machine, run)
    if not run.is_flush_async:
        flush = 1 / (1 / (4 * rates.blocking_flush) - 1 / (4 * profile.gpu_upcast_params_per_s))
        profile = replace(
            profile, d2h_bytes_per_s=flush, d2h_both_bytes_per_s=flush, d2h_busy_bytes_per_s=flush * _NO_GUARANTEE
        )
    plan = published_plan(run.placement, is_interleaved=run.stride is not None, is_flush_async=run.is_flush_async)
    played = simulate(
        plan, run.layout, PUBLISHED_STATE, profile, backward_seconds=compute_seconds, num_ranks=PUBLISHED_RANKS
    )
    return next(span.start for span in played.timeline.spans if span.op.kind is OpKind.NORM_READY)


@dataclass(frozen=True, slots=True)
class FitRuns:
    """Measured seconds of one model on one machine: what the rates are fitted to, and nothing else.

    numel, subgroups: of one rank; plain, stride_2, stride_10: updates; the backward pass with a blocking and with an
    asynchronous flush, both without interleaving.
    """

    numel: int
    subgroups: int
    plain: float
    stride_2: float
    stride_10: float
    blocking_backward: float
    async_backward: float


def fit_rates(runs: FitRuns, machine: HardwareProfile) -> PublishedRates:
    """Rates with which the simulator gives the fitted runs: CPU from stride 10, memory from stride 2, the way back of
    weights from no stride, the blocking flush from the difference of two backward passes.

    Raises ValueError where no memory rate explains stride 2.
    """
    flush = runs.numel / max(1e-9, runs.blocking_backward - runs.async_backward)

    def step(stride: int | None, rates: PublishedRates) -> float:
        return predicted_step_seconds(PublishedRun(runs.numel, runs.subgroups, stride), rates, machine)

    rates = PublishedRates(runs.numel / runs.stride_10, 30 * runs.numel / runs.stride_10, 1e12, flush)
    is_met, rounds = False, 0
    while not is_met:
        if rounds == _MOST_ROUNDS or rates.dram_bytes_per_s > _MOST_DRAM_BYTES_PER_S:
            raise ValueError(f"no memory rate explains {runs.stride_2:.3f} s at stride 2: check the fitted runs")
        rounds += 1  # each time is nearly proportional to 1 / its rate
        too_slow_10 = step(10, rates) / runs.stride_10
        rates = replace(rates, cpu_adam=rates.cpu_adam * too_slow_10)
        too_slow_2 = step(2, rates) / runs.stride_2
        rates = replace(rates, dram_bytes_per_s=rates.dram_bytes_per_s * too_slow_2**1.5)
        is_met = abs(too_slow_10 - 1) + abs(too_slow_2 - 1) < 1e-3
    back = runs.numel / max(1e-9, runs.plain - runs.stride_10)
    for _ in range(6):  # what the blocking copies add is nearly numel / rate
        rest = step(None, replace(rates, weight_return=back)) - runs.numel / back
        back = runs.numel / max(1e-9, runs.plain - rest)
    return replace(rates, weight_return=back)
