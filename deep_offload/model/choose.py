"""From settings, rates and memory limits to one placement, with its bytes, its predicted time and the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from deep_offload.config import OffloadConfig
from deep_offload.model.cost import StateFormat, Wire, dram_bytes, op_seconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import (
    DeviceBytes,
    HostBytes,
    device_state_bytes,
    format_bytes,
    host_state_bytes,
    resident_bytes,
    slot_bytes,
)
from deep_offload.model.performance import DRAM, best_prediction, lane_costs
from deep_offload.model.run import ComputeSeconds
from deep_offload.model.simulator import Simulation, iteration_cost, settled_iteration, simulate
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Lane, OpKind, Place, Placement
from deep_offload.plan.placement import gpu_share_of, nearest_stride, place_by_share, place_by_stride, spread
from deep_offload.plan.planner import OpSeconds, build_plan
from deep_offload.plan.timeline import Timeline

_SIMULATE_ALL = 16
"""Up to so many offloaded subgroups every share is simulated; beyond, a grid and the neighbors of its best."""

FEW_SLOTS, MANY_SLOTS = 4, 8
"""Staging slots of `auto`. Four keep both directions of the link and the GPU busy; each one beyond them moves a
prefetch and a flush out of the update, into compute."""

_MANY_SLOTS_SHARE = 0.15
"""Part of the subgroups that have a slot where MANY_SLOTS are a smaller part: passes grow with the model, and hide as
many times the copies."""

_MANY_SLOTS_GAIN = 0.02
"""Part of the iteration that the larger number must save: less is within what predictions are wrong by."""

_UNASKED_SHARE = 0.25
"""Part of the free device memory that the larger number may take where no budget was given: activations of the first
step are still to come."""


_RESERVED_SHARE = 1 / 8
"""How far the GPU's share may fall below the one at the start."""

_RESERVE_LIMIT = 0.9
"""Part of the host's limit up to which a reserve is taken: it must not press on what a run needs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement of one rank's subgroups that fits, and what is expected of it.

    stride: the forced stride, else the one nearest to the share; None: nothing is streamed. wire, split_master: see
    `StateFormat`. predicted_update_seconds: from the gradient norm until all parameters are in place.
    predicted_iteration_seconds: from norm to norm in the steady state, with the compute that was given or assumed.
    num_slots: staging slots in use. binding_lane: cpu, gpu, h2d, d2h or dram, `none` where nothing is updated. why: one
    sentence.
    """

    placement: Placement
    gpu_share: float
    stride: int | None
    resident_fraction: float
    wire: Wire
    split_master: bool
    num_slots: int
    predicted_update_seconds: float
    predicted_iteration_seconds: float
    binding_lane: str
    lane_shares: dict[str, float]
    host_bytes: HostBytes
    device_bytes: DeviceBytes
    why: str
    reserved: frozenset[int] = frozenset()
    """Streamed subgroups whose host bytes let the CPU update them later."""

    @property
    def state(self) -> StateFormat:
        return StateFormat(self.split_master, self.wire)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that one rank's state may take; None: unknown, not checked.

    device_bytes: for residents, slots and upcast buffers. spare_device_bytes: the same, with more slots than are
    needed. host_bytes: for the pinned arena.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    spare_device_bytes: int | None = None

    def hold(self, host: int, device: int, *, is_spare: bool) -> bool:
        """Whether state of so many bytes fits; is_spare: with more slots than are needed."""
        within = [(host, self.host_bytes), (device, self.device_bytes)]
        within += [(device, self.spare_device_bytes)] if is_spare else []
        return all(limit is None or size <= limit for size, limit in within)


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one iteration's compute: the first micro-batch's forward pass, which waits for parameters; the last
    one's backward pass, which makes gradients final; and everything between."""

    forward: float
    backward: float
    other: float = 0.0

    @classmethod
    def of(cls, seconds: ComputeSeconds) -> Compute:
        """The estimate for a run."""
        return cls(seconds.forward, seconds.backward, seconds.iteration - seconds.forward - seconds.backward)


def assumed_compute(layout: ShardLayout, seconds: OpSeconds) -> Compute:
    """Where nobody knows: no forward pass, and a backward pass just as long as all gradients' way to the host."""
    return Compute(0.0, sum(seconds(OpKind.GRAD_FLUSH, s.index) for s in layout.subgroups))


def is_share_free(config: OffloadConfig) -> bool:
    """Whether the GPU's share is for us to find, and to change."""
    is_open = config.offload_gpu_share == "auto" and config.offload_stride == "auto"
    return config.interleaved_offload and is_open


def choose_placement(
    layout: ShardLayout,
    config: OffloadConfig,
    profile: HardwareProfile,
    *,
    device_budget_bytes: int | None = None,
    spare_device_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    can_split: bool = False,
    num_ranks: int = 1,
    compute: Compute | None = None,
    may_move: bool = False,
) -> Choice:
    """Choose wire, storage, residents and GPU share for one rank; settings that are not `auto` are kept.

    Of the placements that fit, the one with the shortest predicted iteration. spare_device_bytes: what all else leaves
    of the device, which more slots than are needed must respect; None: unknown, then a part of the budget.
    can_split: 16-bit parameters are bf16, so that their master may be split. num_ranks: ranks of this host at work.
    compute: what surrounds the update; None: unknown, then no forward pass and a backward pass just as long as all
    gradients' way to the host. may_move: the share may change between steps: host bytes are reserved for a lower one.
    Raises ValueError, one sentence with numbers and the flag to change, when the settings contradict the types or
    the state does not fit.
    """
    if spare_device_bytes is None and config.offload_device_budget_gib is None and device_budget_bytes is not None:
        spare_device_bytes = int(_UNASKED_SHARE * device_budget_bytes)
    limits = Limits(device_budget_bytes, host_limit_bytes, spare_device_bytes)
    search = _Search(layout, config, profile, limits, num_ranks, compute, may_move)
    state = StateFormat(_choose_split(layout, config, can_split), "fp32")
    if config.interleaved_offload:
        state = StateFormat(state.split_master, _choose_wire(layout, config, profile, state, num_ranks))
        return search.best(state)
    return search.all_resident(state)


def _choose_split(layout: ShardLayout, config: OffloadConfig, can_split: bool) -> bool:
    has_16_bit = any(s.param_bytes == 2 for s in layout.subgroups)
    if config.offload_split_master == "on" and not (can_split and has_16_bit):
        raise ValueError(
            "--offload-split-master on needs bf16 parameters, and there are none: train with --bf16 or leave it at auto"
        )
    # Fewer bytes on every lane and in every memory, the same bits: it wins wherever it is possible.
    return config.offload_split_master != "off" and can_split and has_16_bit


def _choose_wire(
    layout: ShardLayout, config: OffloadConfig, profile: HardwareProfile, state: StateFormat, num_ranks: int
) -> Wire:
    has_16_bit = any(s.grad_bytes < 4 for s in layout.subgroups)
    if config.offload_grad_wire == "param" and not has_16_bit and layout.subgroups:
        raise ValueError(
            "--offload-grad-wire param sends gradients in the buffer's own 16-bit type, but the buffer is fp32: "
            "add --grad-reduce-in-bf16 or leave the wire at auto"
        )
    if config.offload_grad_wire != "auto":
        return config.offload_grad_wire
    if not has_16_bit:
        return "fp32"
    rates: dict[Wire, float] = {}
    for wire in ("param", "fp32"):
        costs = lane_costs(layout, StateFormat(state.split_master, wire), profile, num_ranks=num_ranks)
        rates[wire] = best_prediction(costs).params_per_s
    return "fp32" if rates["fp32"] > rates["param"] else "param"


@dataclass(frozen=True, slots=True)
class _Search:
    """What all candidates share."""

    layout: ShardLayout
    config: OffloadConfig
    profile: HardwareProfile
    limits: Limits
    num_ranks: int
    compute: Compute | None
    may_move: bool
    played: dict[tuple[Placement, StateFormat, int, int, int], Simulation] = field(default_factory=dict)

    @property
    def _num_slots(self) -> int:
        """As given, else the number that `auto` starts from."""
        given = self.config.offload_num_slots
        return FEW_SLOTS if given == "auto" else given

    def all_resident(self, state: StateFormat) -> Choice:
        placement = (Place.RESIDENT,) * len(self.layout.subgroups)
        device = device_state_bytes(self.layout, placement, state, 0)
        if self.limits.device_bytes is not None and device.total > self.limits.device_bytes:
            raise ValueError(
                f"optimizer state needs {format_bytes(device.total)} of GPU memory and "
                f"{format_bytes(self.limits.device_bytes)} are left for it: add --interleaved-offload"
            )
        return self._choice(placement, state, self._num_slots, "no offload: all state stays on the GPU")

    def best(self, state: StateFormat) -> Choice:
        residents, why_residents = self._residents(state)
        num = len(self.layout.subgroups)
        forced, why = self._forced(num, residents / num if num else 0.0)
        if forced is not None:
            self._check_fits(forced, state)
            few = forced
        else:
            few, why = self._best_of_shares(residents, state, self._num_slots)
        placement, num_slots, why_slots = self._with_slots(few, forced, residents, state)
        reserved = self._reserve(placement, state)
        return self._choice(placement, state, num_slots, why + why_slots + why_residents, reserved)

    def _reserve(self, placement: Placement, state: StateFormat) -> frozenset[int]:
        """Streamed subgroups that a lower share would leave to the CPU, if the host has room for them."""
        if not self.may_move or not is_share_free(self.config) or self.profile.num_gpus == 0:
            return frozenset()
        if Place.CPU not in placement and any(state.needs_upcast(s) for s in self.layout.subgroups):
            return frozenset()  # there is no buffer for upcasts, which the CPU's gradients would take
        streamed = [i for i, place in enumerate(placement) if place is Place.GPU]
        offloaded = sum(place is not Place.RESIDENT for place in placement)
        reserved = frozenset(spread(streamed, min(len(streamed), int(_RESERVED_SHARE * offloaded))))
        total, limit = host_state_bytes(self.layout, placement, state, reserved).total, self.limits.host_bytes
        return reserved if limit is None or total <= _RESERVE_LIMIT * limit else frozenset()

    def _best_of_shares(
        self, residents: int, state: StateFormat, num_slots: int, also: Collection[int] = ()
    ) -> tuple[Placement, str]:
        """The best placement with this many residents and slots, and how it was found. also: numbers of streamed
        subgroups to try in any case."""
        offloaded = len(self.layout.subgroups) - residents
        candidates, why = self._candidates(offloaded, state)
        candidates = sorted({*candidates, *also})
        fitting = {j: p for j in candidates if self._fits(p := self._placement(j, residents), state, num_slots)}
        if not fitting:
            nearest = min((self._placement(j, residents) for j in candidates), key=lambda p: self._host_total(p, state))
            self._check_fits(nearest, state)
        seconds = {j: self._cost(p, state, num_slots) for j, p in fitting.items()}
        best = min(seconds, key=lambda j: (seconds[j], j))
        for j in self._neighbors(best, candidates, offloaded):
            placement = self._placement(j, residents)
            if self._fits(placement, state, num_slots):
                seconds[j], fitting[j] = self._cost(placement, state, num_slots), placement
        best = min(seconds, key=lambda j: (seconds[j], j))
        why += f"; the simulator's best of {len(seconds)} shares" if len(seconds) > 1 else ""
        return fitting[best], why

    def _with_slots(
        self, few: Placement, forced: Placement | None, residents: int, state: StateFormat
    ) -> tuple[Placement, int, str]:
        """The best placement with `FEW_SLOTS`, or the best (or forced) one with more; with the number and the reason.

        More slots are tried only where residents are not wanted: a resident subgroup takes the bytes of a slot, and
        saves its copies instead of moving them out of the update.
        """
        is_open = self.config.offload_num_slots == "auto" and self.config.offload_resident_fraction == 0
        if not is_open or few.count(Place.GPU) <= FEW_SLOTS:
            return few, self._num_slots, ""
        most = max(MANY_SLOTS, round(_MANY_SLOTS_SHARE * len(few)))
        many = next((n for n in (most, MANY_SLOTS) if self._fits(few, state, n)), None)
        if many is None:
            return few, FEW_SLOTS, f"; {FEW_SLOTS} slots, as {MANY_SLOTS} do not fit"
        also = [few.count(Place.GPU)]  # it fits, which no share of the grid may
        found = forced if forced is not None else self._best_of_shares(residents, state, many, also)[0]
        seconds = [self._settled(*one).iteration_seconds for one in ((found, state, many), (few, state, FEW_SLOTS))]
        gain = 1 - seconds[0] / seconds[1]
        if gain < _MANY_SLOTS_GAIN:
            return few, FEW_SLOTS, f"; {FEW_SLOTS} slots, as {many} would gain less than 2 %"
        used = min(many, found.count(Place.GPU))
        return found, many, f"; {used} slots instead of {FEW_SLOTS} shorten the iteration by {100 * gain:.0f} %"

    def _residents(self, state: StateFormat) -> tuple[int, str]:
        """Number of subgroups that stay on the GPU, and the reason."""
        subgroups = self.layout.subgroups
        wanted = self.config.offload_resident_fraction
        if wanted != "auto":
            return int(len(subgroups) * wanted + 1e-9), f"; {wanted:g} of the state stays on the GPU"
        budget = self.limits.device_bytes
        if budget is None:
            return 0, "; no device budget is given, so nothing stays on the GPU"
        sizes = [resident_bytes(s, state) for s in subgroups]
        if sum(sizes) <= budget:
            return len(subgroups), f"; all state fits in the device budget of {format_bytes(budget)}"
        everyone = (Place.GPU,) + (Place.CPU,) * (len(subgroups) - 1)
        upcast = device_state_bytes(self.layout, everyone, state, 0).upcast
        left = budget - upcast - self._num_slots * slot_bytes(subgroups, state)
        count = 0
        while count < len(sizes) and sizes[count] <= left:
            left -= sizes[count]
            count += 1
        return count, f"; {count} subgroups fit beside the slots in the device budget of {format_bytes(budget)}"

    def _forced(self, num: int, fraction: float) -> tuple[Placement | None, str]:
        stride, share = self.config.offload_stride, self.config.offload_gpu_share
        if isinstance(stride, int):
            return place_by_stride(num, stride, fraction), f"stride {stride} as asked"
        if stride == "none":
            return place_by_stride(num, None, fraction), "no stride as asked: all on the CPU"
        if share != "auto":
            return place_by_share(num, float(share), fraction), f"GPU share {share:g} as asked"
        return None, ""

    def _candidates(self, offloaded: int, state: StateFormat) -> tuple[list[int], str]:
        """Numbers of streamed subgroups to try, and how they were found."""
        if offloaded == 0:
            return [0], "nothing is offloaded"
        if not self._slots_fit(state):
            return [0], "the GPU memory for state holds no staging slots, so all is updated on the CPU"
        costs = lane_costs(self.layout, state, self.profile, num_ranks=self.num_ranks)
        closed = best_prediction(costs)
        why = f"the closed form says GPU share {closed.gpu_share:.2f}, bound by {closed.binding_lane}"
        if offloaded <= _SIMULATE_ALL:
            return list(range(offloaded + 1)), why
        grid = {round(offloaded * i / 8) for i in range(9)}
        return sorted(grid | {round(offloaded * closed.gpu_share)}), why

    def _slots_fit(self, state: StateFormat) -> bool:
        """False where streaming is not forced and no slots fit. A given subgroup size that is too large is an error."""
        budget = self.limits.device_bytes
        need = self._num_slots * slot_bytes(self.layout.subgroups, state)
        if budget is None or need <= budget:
            return True
        if self.config.offload_subgroup_numel != "auto":
            raise ValueError(self._slot_message(need, budget))
        return False

    def _slot_message(self, need: int, budget: int) -> str:
        largest = self.layout.max_subgroup_numel
        return (
            f"{self._num_slots} staging slots for subgroups of {largest} elements need "
            f"{format_bytes(need)}, but the device budget is {format_bytes(budget)}: lower --offload-subgroup-numel or "
            "--offload-num-slots, or raise --offload-device-budget-gib"
        )

    def _neighbors(self, best: int, tried: Iterable[int], offloaded: int) -> list[int]:
        """Numbers of streamed subgroups around the best of a grid, not tried yet: about 1/24 of all apart."""
        known = set(tried)
        step = max(1, round(offloaded / 24))
        near = [best + step * i for i in (-2, -1, 1, 2)]
        return [j for j in near if 0 <= j <= offloaded and j not in known]

    def _placement(self, num_streamed: int, residents: int) -> Placement:
        num = len(self.layout.subgroups)
        offloaded = num - residents
        return place_by_share(num, num_streamed / offloaded if offloaded else 0.0, residents / num if num else 0.0)

    def _cost(self, placement: Placement, state: StateFormat, num_slots: int) -> float:
        return iteration_cost(partial(self._play, placement, state, num_slots))

    def _settled(self, placement: Placement, state: StateFormat, num_slots: int) -> Simulation:
        return settled_iteration(partial(self._play, placement, state, num_slots))

    def _play(
        self, placement: Placement, state: StateFormat, num_slots: int, num_iterations: int, num_following: int
    ) -> Simulation:
        key = placement, state, num_slots, num_iterations, num_following
        if key not in self.played:
            seconds = op_seconds(self.layout, state, self.profile)
            compute = self.compute or assumed_compute(self.layout, seconds)
            self.played[key] = simulate(
                build_plan(self.layout, placement, num_slots, seconds),
                self.layout,
                state,
                self.profile,
                forward_seconds=compute.forward,
                backward_seconds=compute.backward,
                other_seconds=compute.other,
                num_iterations=num_iterations,
                num_following=num_following,
                num_ranks=self.num_ranks,
            )
        return self.played[key]

    def _host_total(self, placement: Placement, state: StateFormat) -> int:
        return host_state_bytes(self.layout, placement, state).total

    def _fits(self, placement: Placement, state: StateFormat, num_slots: int) -> bool:
        device = device_state_bytes(self.layout, placement, state, num_slots).total
        return self.limits.hold(self._host_total(placement, state), device, is_spare=num_slots > self._num_slots)

    def _check_fits(self, placement: Placement, state: StateFormat) -> None:
        device = device_state_bytes(self.layout, placement, state, self._num_slots)
        budget = self.limits.device_bytes
        if budget is not None and device.slots > budget:
            raise ValueError(self._slot_message(device.slots, budget))
        if budget is not None and device.total > budget:
            raise ValueError(
                f"{format_bytes(device.resident)} of state on the GPU, {format_bytes(device.slots)} of staging "
                f"slots and {format_bytes(device.upcast)} of upcast buffers exceed the device budget of "
                f"{format_bytes(budget)}: "
                "lower --offload-resident-fraction or raise --offload-device-budget-gib"
            )
        host = self._host_total(placement, state)
        if self.limits.host_bytes is not None and host > self.limits.host_bytes:
            raise ValueError(
                f"optimizer state needs {format_bytes(host)} of host memory, but this rank has "
                f"{format_bytes(self.limits.host_bytes)}: raise --offload-resident-fraction to keep more on the GPU, "
                "raise --offload-host-budget-gib, or use more data-parallel ranks"
            )

    def _choice(
        self,
        placement: Placement,
        state: StateFormat,
        num_slots: int,
        why: str,
        reserved: frozenset[int] = frozenset(),
    ) -> Choice:
        share = gpu_share_of(placement)
        num_streamed = sum(place is Place.GPU for place in placement)
        played = self._settled(placement, state, num_slots)
        timeline = played.timeline
        lanes = _lane_shares(timeline, self.layout, state, self.profile.rank_dram_bytes_per_s(self.num_ranks))
        lane = max(lanes, key=lambda name: lanes[name]) if timeline.update_seconds > 0 else "none"
        stride = self.config.offload_stride
        num_residents = sum(place is Place.RESIDENT for place in placement)
        return Choice(
            placement=placement,
            gpu_share=share,
            stride=stride if isinstance(stride, int) else nearest_stride(share),
            resident_fraction=num_residents / len(placement) if placement else 0.0,
            wire=state.wire,
            split_master=state.split_master,
            num_slots=min(num_slots, num_streamed),
            predicted_update_seconds=timeline.in_place_seconds,
            predicted_iteration_seconds=played.iteration_seconds,
            binding_lane=lane,
            lane_shares=lanes,
            host_bytes=host_state_bytes(self.layout, placement, state, reserved),
            device_bytes=device_state_bytes(self.layout, placement, state, num_slots),
            why=why,
            reserved=reserved,
        )


def _lane_shares(timeline: Timeline, layout: ShardLayout, state: StateFormat, dram_rate: float) -> dict[str, float]:
    """Busy share of each lane in the update phase; of host memory, bytes over its bandwidth."""
    shares = {lane.value: timeline.busy_share(lane) for lane in (Lane.CPU, Lane.GPU, Lane.H2D, Lane.D2H)}
    seconds = timeline.update_seconds
    moved = sum(
        part * dram_bytes(span.op.kind, layout.subgroups[span.op.subgroup], state)
        for span, part in timeline.update_parts
    )
    shares[DRAM] = moved / dram_rate / seconds if seconds > 0 else 0.0
    return shares
