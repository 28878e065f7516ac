"""The method's performance model with host memory as a lane: best GPU share, stride, update seconds. Standard library.

A parameter of class i costs (d, h, m) bytes of D2H, H2D and host memory in the update phase, and time on the lane that
updates it. With a share x of the offloaded parameters updated on the GPU, every lane needs a time per parameter that is
linear in x, and the update takes as long as the busiest lane:

    seconds per parameter = max( m(x)/M, h(x)/B_h2d, d(x)/B_d2h, (1-x)/U_c, x/U_g )

The best share is where that maximum is least: at 0, at 1, or where two lanes cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from deep_offload.model.cost import StateFormat, dram_bytes, link_bytes, op_cost
from deep_offload.model.hardware import HardwareProfile
from deep_offload.plan.layout import ShardLayout, Subgroup
from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.plan.placement import nearest_stride
from deep_offload.plan.timeline import Timeline

DRAM = "dram"
_CPU_KINDS = (OpKind.UPDATE_CPU, OpKind.PARAM_H2D)
_GPU_KINDS = (OpKind.PREFETCH, OpKind.UPDATE_GPU, OpKind.FLUSH)


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """Seconds that one parameter keeps each lane busy, when the CPU updates it and when the GPU does."""

    cpu_update: Mapping[str, float]
    gpu_update: Mapping[str, float]

    def seconds_per_param(self, gpu_share: float) -> dict[str, float]:
        """Busy time of each lane per offloaded parameter."""
        return {lane: (1 - gpu_share) * s + gpu_share * self.gpu_update[lane] for lane, s in self.cpu_update.items()}

    def binding(self, gpu_share: float) -> tuple[str, float]:
        """The lane that takes longest at this share, and its seconds per parameter."""
        lanes = self.seconds_per_param(gpu_share)
        lane = max(lanes, key=lambda name: lanes[name])
        return lane, lanes[lane]


def lane_costs(
    layout: ShardLayout, state: StateFormat, profile: HardwareProfile, *, num_ranks: int = 1, busy: bool = True
) -> LaneCosts:
    """Costs of an average parameter of the layout, with `num_ranks` ranks of the host at work.

    busy: rates with the other lanes at work (to predict); False: every lane alone (a bound that nothing beats).
    """
    dram = profile.rank_dram_bytes_per_s(num_ranks)
    numel = max(1, layout.numel)

    def per_param(kinds: tuple[OpKind, ...]) -> dict[str, float]:
        def total(kind: OpKind) -> int:
            return sum(link_bytes(kind, s, state) for s in layout.subgroups)

        up = sum(total(kind) for kind in kinds if kind in (OpKind.PREFETCH, OpKind.PARAM_H2D))
        down = sum(total(kind) for kind in kinds if kind is OpKind.FLUSH)
        memory = sum(dram_bytes(kind, s, state) for kind in kinds for s in layout.subgroups)
        cpu = sum(_cpu_seconds(s, state, profile, busy=busy) for s in layout.subgroups)
        return {
            DRAM: memory / dram / numel,
            "h2d": up / (profile.h2d_both_bytes_per_s if busy else profile.h2d_bytes_per_s) / numel,
            "d2h": down / (profile.d2h_both_bytes_per_s if busy else profile.d2h_bytes_per_s) / numel,
            "cpu": cpu / numel if OpKind.UPDATE_CPU in kinds else 0.0,
            "gpu": 1 / profile.gpu_adam_params_per_s if OpKind.UPDATE_GPU in kinds else 0.0,
        }

    return LaneCosts(per_param(_CPU_KINDS), per_param(_GPU_KINDS))


def _cpu_seconds(subgroup: Subgroup, state: StateFormat, profile: HardwareProfile, *, busy: bool) -> float:
    wire = "fp32" if state.wire_bytes_per_param(subgroup) == 4 else "param"
    return subgroup.numel / profile.cpu_adam_params_per_s(wire, busy=busy)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the closed form says about one share.

    params_per_s: rate of the update phase; lane_shares: busy share of each lane at that rate, 1 for the binding lane.
    """

    gpu_share: float
    stride: int | None
    params_per_s: float
    binding_lane: str
    lane_shares: Mapping[str, float]


def predict(costs: LaneCosts, gpu_share: float) -> Prediction:
    """Rate and binding lane at a given share."""
    lane, seconds = costs.binding(gpu_share)
    shares = {name: busy / seconds for name, busy in costs.seconds_per_param(gpu_share).items()}
    return Prediction(gpu_share, nearest_stride(gpu_share), 1 / seconds, lane, shares)


def best_prediction(costs: LaneCosts) -> Prediction:
    """The share at which the busiest lane is least busy; of equal ones the smallest."""
    return min((predict(costs, x) for x in _candidate_shares(costs)), key=lambda p: (1 / p.params_per_s, p.gpu_share))


def _candidate_shares(costs: LaneCosts) -> list[float]:
    shares = [0.0, 1.0]
    at_0, at_1 = costs.cpu_update, costs.gpu_update
    for a, b in combinations(at_0, 2):
        slope = (at_1[a] - at_0[a]) - (at_1[b] - at_0[b])
        if slope != 0:
            x = (at_0[b] - at_0[a]) / slope
            if 0 < x < 1:
                shares.append(x)
    return sorted(shares)


def work_seconds(
    work: Iterable[tuple[Op, float]],
    layout: ShardLayout,
    state: StateFormat,
    profile: HardwareProfile,
    *,
    num_ranks: int = 1,
) -> dict[str, float]:
    """Seconds that operations keep each lane busy at the rates it has alone, and host memory at its bandwidth.

    work: operations with the part of each that counts (0..1). Nothing does it in less than the largest of the seconds.
    """
    seconds = {DRAM: 0.0, **{lane.value: 0.0 for lane in Lane if lane is not Lane.MAIN}}
    dram = profile.rank_dram_bytes_per_s(num_ranks)
    for op, part in work:
        if op.lane is not Lane.MAIN:
            cost = op_cost(op.kind, layout.subgroups[op.subgroup], state, profile)
            seconds[op.lane.value] += part * cost.seconds
            seconds[DRAM] += part * cost.dram_bytes / dram
    return seconds


def share_of_bound(
    timeline: Timeline, layout: ShardLayout, state: StateFormat, profile: HardwareProfile, *, num_ranks: int = 1
) -> tuple[float, str]:
    """How near a measured or simulated update came to the bound of its own work, and the lane that sets the bound.

    1.0: the lane worked through the update phase at its full rate. Above 1 the machine beat its profile.
    """
    parts = ((span.op, part) for span, part in timeline.update_parts)
    work = work_seconds(parts, layout, state, profile, num_ranks=num_ranks)
    lane = max(work, key=lambda name: work[name])
    seconds = timeline.update_seconds
    return (work[lane] / seconds if seconds > 0 else 0.0), lane


def method_stride(profile: HardwareProfile, *, is_serialized: bool = False) -> float | None:
    """The published stride formula, without a host memory lane: k = 1 + (3/B + 1/U_g) / d, real-valued.

    d = 1/U_c - 1/(2B) is what a CPU-updated parameter leaves of the H2D lane; the downcast is fused into the CPU
    update. B counts fp32 values per second in one direction. is_serialized: flush and prefetch do not overlap, which
    takes 6/B. None: the link is so slow that the CPU always wins.
    """
    link = min(profile.h2d_both_bytes_per_s, profile.d2h_both_bytes_per_s) / 4
    left = 1 / profile.cpu_adam_params_per_s("fp32", busy=False) - 1 / (2 * link)
    if left <= 0:
        return None
    return 1 + ((6 if is_serialized else 3) / link + 1 / profile.gpu_adam_params_per_s) / left


def round_stride(stride: float | None) -> int | None:
    """The whole stride of the published scheduler: rounded up, so that the GPU's work fits behind the CPU's."""
    return None if stride is None else math.ceil(stride - 1e-9)
