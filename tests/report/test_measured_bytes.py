"""What a simulation counts is what the engine moves and holds, whatever the placement, wire and storage."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.model.cost import StateFormat, link_bytes
from deep_offload.model.memory import device_state_bytes, host_state_bytes
from deep_offload.plan.ops import Lane
from tests.optimizer.engine_cases import Case, adam_classes, fill_grads, make_engine, make_model

cases = st.builds(
    Case,
    share=st.sampled_from((0.0, 0.3, 0.5, 1.0)),
    stride=st.sampled_from((None, 1, 2, 3, 50)),
    resident=st.sampled_from((0.0, 0.25, 0.6, 1.0)),
    slots=st.integers(1, 4),
    subgroup=st.sampled_from((128, 300, 5000)),
    wire=st.sampled_from(("fp32", "param")),
    split=st.booleans(),
    grad_dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(cases)
def test_bytes_of_the_plan_are_those_of_the_engine(case):
    """Every operation of a measured step moved the bytes that its cost says; memory is what was predicted."""
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for step in (1, 2):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(adam_classes(step), model.group_of, 0.5)
        timeline = engine.timeline()
        state, layout = StateFormat(case.split, case.wire), engine.layout
        assert tuple(span.op for span in timeline.spans) == engine.plan.ops
        for span in timeline.spans:
            if span.op.lane is not Lane.MAIN:
                assert span.num_bytes == link_bytes(span.op.kind, layout.subgroups[span.op.subgroup], state), span.op
        placement = engine.settings.placement
        host = host_state_bytes(layout, placement, state).total
        device = device_state_bytes(layout, placement, state, case.slots)
        assert abs(engine.host_bytes - host) <= 0.03 * host
        # A device array takes whole allocation units on paper; these tiny ones are mostly that.
        assert engine.device_bytes <= device.resident + device.slots
    finally:
        engine.close()


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 3))
def test_kept_steps_are_the_last_ones(count):
    """The engine keeps as many steps as it was told, in order, on one clock."""
    case = Case(share=0.5)
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        engine.keep_timelines(count)
        for step in range(1, 5):
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            engine.update(adam_classes(step), model.group_of, 0.5)
        timelines = engine.timelines()
        assert len(timelines) == count
        ends = [max(span.end for span in timeline.spans) for timeline in timelines]
        assert ends == sorted(ends)
        assert all(span.waited >= 0 for timeline in timelines for span in timeline.spans)
        assert engine.finished_timeline() is not None
    finally:
        engine.close()
