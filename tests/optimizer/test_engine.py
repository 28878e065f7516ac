"""Whatever the placement, the engine gives the bits of the all-resident run and of an independent oracle."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import (
    ALL_RESIDENT,
    GROUPS,
    Case,
    assert_same_bits,
    bits,
    collect,
    drive,
    fill_grads,
    make_engine,
    make_model,
)
from oracle import OracleParam

from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.engine import STATE_NAMES
from deep_offload.plan.ops import Lane, OpKind, Place
from deep_offload.runtime.lanes import LaneError

NUM_STEPS = 20

_PLACES = [dict(share=s) for s in (0.0, 1 / 3, 0.5, 1.0)] + [dict(stride=k) for k in (2, 3)]
_PRODUCT = [
    dict(**place, resident=resident, slots=slots, subgroup=subgroup)
    for place, resident, slots, subgroup in itertools.product(_PLACES, (0.0, 0.5, 1.0), (1, 2, 3), (256, 300))
]


@pytest.fixture(scope="module")
def resident_runs():
    """All-resident runs by (accumulation, type, gradient type), computed once."""
    cache: dict = {}

    def get(case: Case):
        key = case.accumulation, case.dtype, case.grad_dtype
        if key not in cache:
            cache[key] = drive(Case(**ALL_RESIDENT, accumulation=key[0], dtype=key[1], grad_dtype=key[2]), NUM_STEPS)
        return cache[key]

    return get


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("wire", ["fp32", "param"])
@pytest.mark.parametrize("threads", [1, 2])
def test_full_product_has_the_bits_of_the_resident_run(resident_runs, threads, wire, accumulation):
    """Shares, strides, residents, slots and subgroup sizes, each with each: parameters and states are torch.equal."""
    for settings in _PRODUCT:
        case = Case(**settings, threads=threads, wire=wire, accumulation=accumulation, split=settings["slots"] != 2)
        assert_same_bits(drive(case, NUM_STEPS), resident_runs(case), str(case))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_other_types_have_the_bits_of_the_resident_run(resident_runs, dtype, grad_dtype, share):
    """fp32 gradient buffers, fp16 models and fp32 parameters (their own masters) are placed without changing a bit."""
    case = Case(share=share, resident=0.25, dtype=dtype, grad_dtype=grad_dtype)
    assert_same_bits(drive(case, NUM_STEPS), resident_runs(case), str(case))


@pytest.mark.parametrize(
    "case",
    [
        Case(share=0.5),
        Case(share=0.0, wire="param"),
        Case(**ALL_RESIDENT),
        Case(share=1.0, dtype=torch.float16, grad_dtype=torch.float16),
    ],
    ids=["half", "cpu", "resident", "fp16"],
)
def test_oracle_reproduces_every_parameter(case):
    """A per-parameter Adam written apart, fed clones of the final gradients, gives the same state and weights."""
    oracle: dict[int, OracleParam] = {}

    def watch(step, model, scale):
        assert step > 1 or scale < 1.0, "clipping must be active"
        for number, (shard, start, end) in model.grads.items():
            if step == 1:
                oracle[number] = OracleParam(model.shards[shard].param[start:end])
            lr, betas, eps, wd = GROUPS[model.group_of[number]]
            grad = model.shards[shard].grad[start:end].clone()
            oracle[number].update(grad, lr=lr, betas=betas, eps=eps, weight_decay=wd, scale=scale)

    got = drive(case, NUM_STEPS, watch)
    model = make_model(case)
    offsets = [0]
    for shard in model.shards:
        offsets.append(offsets[-1] + shard.param.numel())
    for number, (shard, start, end) in model.grads.items():
        piece = slice(offsets[shard] + start, offsets[shard] + end)
        want = oracle[number]
        for name, tensor in (
            ("master", want.master),
            ("exp_avg", want.exp_avg),
            ("exp_avg_sq", want.exp_avg_sq),
            ("weight", want.weight()),
        ):
            assert torch.equal(bits(got[name][piece]), bits(tensor)), f"parameter {number}: {name} differs"


def test_cases_are_what_they_claim():
    """The synthetic model has four buckets and at least 12 subgroups, with borders inside parameters."""
    model = make_model(Case())
    engine = make_engine(Case(share=0.5), model)
    try:
        layout = engine.layout
        assert len(layout.shards) == 4
        assert len(layout.subgroups) >= 12
        starts = {(s.shard, s.start) for s in layout.subgroups if s.start}
        assert any(g.start < start < g.end for shard, start in starts for g in model.shards[shard].segments)
        assert {Place.CPU, Place.GPU} == set(engine.settings.placement)
    finally:
        engine.close()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_moved_bytes_are_those_of_the_placement(share):
    """Bytes on each lane are what the placement says: nothing is resident by accident, nothing moves twice."""
    case, steps = Case(share=share, split=True), 5
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for step in range(1, steps + 1):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(_classes(step), model.group_of, 0.5)
        engine.synchronize()
        placed = {
            place: sum(s.numel for s in engine.layout.subgroups if engine.settings.placement[s.index] is place)
            for place in Place
        }
        streamed = [s.numel for s in engine.layout.subgroups if engine.settings.placement[s.index] is Place.GPU]
        ahead = sum(streamed[: case.slots])  # the next step's first prefetches have been issued too
        traffic = engine.traffic
        assert traffic["d2h_bytes"] == steps * (10 * placed[Place.GPU] + 4 * placed[Place.CPU])
        assert traffic["h2d_bytes"] == steps * (10 * placed[Place.GPU] + 2 * placed[Place.CPU]) + 10 * ahead
        assert traffic["upcast_bytes"] == steps * 4 * placed[Place.CPU]
        assert traffic["cpu_params"] == steps * placed[Place.CPU]
        assert traffic["gpu_params"] == steps * placed[Place.GPU]
    finally:
        engine.close()


def test_skipped_update_leaves_state_untouched():
    """A step that is skipped changes no bit, and the run goes on as if it had not been there."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for step in range(1, 4):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(_classes(step), model.group_of, 0.5)
        engine.synchronize()
        before = collect(engine, model)
        model.shards[0].grad[5] = float("nan")
        for i in range(4):
            engine.grads_ready(i)
        engine.skip_update()
        assert_same_bits(collect(engine, model), before, "after a skipped step")
        fill_grads(case, model, 4)
        engine.update(_classes(4), model.group_of, 0.5)
        engine.synchronize()
        after = collect(engine, model)
    finally:
        engine.close()
    plain_model = make_model(case)
    plain = make_engine(case, plain_model)
    try:
        for step in range(1, 5):
            plain.wait_until_reusable()
            fill_grads(case, plain_model, step)
            plain.update(_classes(step), plain_model.group_of, 0.5)
        plain.synchronize()
        assert_same_bits(after, collect(plain, plain_model), "one step later")
    finally:
        plain.close()


def test_held_parameter_keeps_every_bit():
    """Class HOLD leaves a parameter's weights and states alone while its neighbors are updated."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        start = collect(engine, model)
        fill_grads(case, model, 1)
        held = [-1 if number == 3 else group for number, group in enumerate(model.group_of)]
        engine.update(_classes(1), held, 0.5)
        engine.synchronize()
        after = collect(engine, model)
        offset = model.shards[0].param.numel()
        piece = slice(offset + model.grads[3][1], offset + model.grads[3][2])
        for name in ("weight", *STATE_NAMES):
            assert torch.equal(bits(after[name][piece]), bits(start[name][piece]))
        assert not torch.equal(after["master"], start["master"])
    finally:
        engine.close()


@pytest.mark.parametrize(
    "case", [Case(share=0.5), Case(**ALL_RESIDENT), Case(share=1.0, split=False)], ids=["half", "resident", "full"]
)
def test_written_state_is_read_back_and_sets_weights(case):
    """A master written from outside is read back bit for bit, and its weights follow, ties away from zero."""
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        fill_grads(case, model, 1)
        engine.update(_classes(1), model.group_of, 0.5)
        engine.synchronize()
        generator = torch.Generator().manual_seed(3)
        wanted = {}
        for s in engine.layout.subgroups:
            wanted[s.index] = {name: torch.rand(s.numel, generator=generator) for name in STATE_NAMES}
            wanted[s.index]["master"][0] = 1.00390625  # halfway between two bf16 numbers
            for name, values in wanted[s.index].items():
                engine.write_state(s.index, name, 0, values)
        engine.synchronize()
        for i, states in wanted.items():
            for name, values in states.items():
                assert torch.equal(bits(engine.read_state(i)[name]), bits(values))
        first = engine.layout.subgroups[0]
        assert model.shards[first.shard].param[first.start].item() == 1.0078125
    finally:
        engine.close()


@pytest.mark.parametrize(
    "kind", [OpKind.UPDATE_CPU, OpKind.UPDATE_GPU, OpKind.PREFETCH, OpKind.FLUSH, OpKind.PARAM_H2D, OpKind.GRAD_FLUSH]
)
def test_lane_error_surfaces_on_the_main_thread(kind):
    """An exception on any lane stops the run within one step, with its own message; nothing hangs."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    original = engine._backend._handlers[kind]

    def broken(op):
        raise MemoryError("planted")

    engine._backend._handlers[kind] = broken
    with pytest.raises(LaneError, match=rf"{kind.value}\[\d+\] failed on the \w+ lane: planted"):
        for step in range(1, 3):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(_classes(step), model.group_of, 0.5)
    engine._backend._handlers[kind] = original
    with pytest.raises(LaneError, match="planted"):
        engine.close()


def _classes(step: int) -> list[AdamClass]:
    return [AdamClass(lr, *betas, eps, wd, step) for lr, betas, eps, wd in GROUPS]


def test_timeline_covers_every_op_of_the_last_step():
    """The measured timeline has a span for each op of the plan, none ends before it starts, edges hold in time."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for step in range(1, 4):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(_classes(step), model.group_of, 0.5)
        timeline = engine.timeline()
        assert [s.op for s in timeline.spans] == list(engine.plan.ops)
        for span in timeline.spans:
            assert span.end >= span.start >= 0
            for a in span.op.after:
                assert timeline.spans[a].end <= span.start or timeline.spans[a].op.lane is span.op.lane is Lane.MAIN
        assert timeline.update_seconds > 0
    finally:
        engine.close()
