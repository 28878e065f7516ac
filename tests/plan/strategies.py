"""Random layouts, placements and machines for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from deep_offload.model.cost import StateFormat
from deep_offload.model.hardware import HardwareProfile
from deep_offload.plan.layout import ShardLayout, ShardSpec, build_layout
from deep_offload.plan.ops import Place, Placement

shard_specs = st.lists(
    st.builds(
        ShardSpec,
        numel=st.integers(0, 4000),
        param_bytes=st.sampled_from([2, 2, 2, 4]),
        grad_bytes=st.sampled_from([2, 4]),
    ),
    min_size=1,
    max_size=5,
)


@dataclass(frozen=True)
class PlacedCase:
    layout: ShardLayout
    placement: Placement
    num_slots: int


@st.composite
def placed_cases(draw, places: tuple[Place, ...] = tuple(Place)) -> PlacedCase:
    layout = build_layout(draw(shard_specs), draw(st.integers(200, 3000)))
    placement = tuple(draw(st.sampled_from(places)) for _ in layout.subgroups)
    return PlacedCase(layout, placement, draw(st.integers(1, 4)))


rates = st.floats(1e8, 1e12, allow_nan=False)


@st.composite
def profiles(draw) -> HardwareProfile:
    """Machines on which lanes that work together are never faster than alone."""

    def no_faster(than: float) -> float:
        return than * draw(st.floats(0.2, 1.0))

    h2d, d2h = draw(rates), draw(rates)
    h2d_both, d2h_both = no_faster(h2d), no_faster(d2h)
    fp32, param = draw(rates), draw(rates)
    dram = draw(rates)
    return HardwareProfile(
        name="random",
        source="hypothesis",
        date="2026-01-01",
        num_gpus=4,
        num_cores=8,
        cpu_threads=2,
        gpu_memory_bytes=1 << 34,
        host_memory_bytes=1 << 36,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        h2d_both_bytes_per_s=h2d_both,
        d2h_both_bytes_per_s=d2h_both,
        h2d_busy_bytes_per_s=no_faster(h2d_both),
        d2h_busy_bytes_per_s=no_faster(d2h_both),
        dram_bytes_per_s=dram,
        host_dram_bytes_per_s=dram * draw(st.floats(1.0, 4.0)),
        cpu_adam_fp32_params_per_s=fp32,
        cpu_adam_param_params_per_s=param,
        cpu_adam_fp32_busy_params_per_s=no_faster(fp32),
        cpu_adam_param_busy_params_per_s=no_faster(param),
        gpu_adam_params_per_s=draw(rates),
        gpu_upcast_params_per_s=draw(rates),
        gpu_flops_per_s=1e14,
        collective_bytes_per_s=1e11,
        op_overhead_seconds=draw(st.sampled_from([0.0, 1e-6])),
    )


state_formats = st.builds(StateFormat, split_master=st.booleans(), wire=st.sampled_from(["fp32", "param"]))
