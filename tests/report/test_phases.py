"""Forward and backward passes in measured timelines: in order, at their step, and none where not asked for."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from deep_offload.model.choose import Compute
from deep_offload.model.trace import explained_share, forward_seconds, run_trace
from deep_offload.optimizer.step_marks import StepMarks, phases_of
from deep_offload.plan.draw import draw_lanes, read_trace
from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.plan.timeline import BACKWARD, FORWARD, NORM, Phase, Span, Timeline
from deep_offload.runtime.lanes import HostDevice
from tests.optimizer.loop_cases import train
from tests.report.run_files import expectation, measured_steps

FLAGS = (
    "--train-iters 4 --global-batch-size 3 --eval-interval 2 --eval-iters 1 --offload-resident-fraction 0 "
    "--offload-gpu-share 0.5 --offload-subgroup-numel 8192"
)
STEP = [(kind, number) for number in range(3) for kind in (FORWARD, BACKWARD)] + [(NORM, -1)]


@pytest.fixture(scope="module")
def measured():
    """(steps, what the trace is predicted by, digest) of four steps of three micro-batches, with evaluations."""
    steps, expected = [], []

    def keep(optimizer):
        optimizer.keep_timelines(4)

    def read(optimizer, _norm):
        if optimizer.num_steps == 4:
            steps.extend(optimizer.timelines())
            expected.append(optimizer.expected)

    result = train(FLAGS, before_step=keep, after_step=read)
    return steps, expected[0], result.digest


def test_passes_of_every_micro_batch(measured):
    """Each step has a forward and a backward pass for each micro-batch, then the norm; evaluations leave nothing."""
    for step in measured[0][1:]:  # the first was under way when keeping began
        assert [(phase.kind, phase.micro_batch) for phase in step.phases] == STEP
        assert all(phase.start <= phase.end for phase in step.phases)
        assert all(a.end <= b.start for a, b in pairwise(step.phases))


def test_passes_belong_to_their_step(measured):
    """They lie between the norm of the step before and their own, and gradients become final in the last backward."""
    steps = measured[0]
    for before, step in pairwise(steps):
        assert before.norm_end <= step.phases[0].start
        assert step.phases[-1].end == step.norm_end
        last = next(p for p in step.phases if (p.kind, p.micro_batch) == (BACKWARD, 2))
        ready = [span.end for span in step.lane(Lane.MAIN) if span.op.kind is OpKind.GRADS_READY]
        assert last.start <= min(ready)


def test_most_of_an_iteration_is_explained(measured):
    """Lanes, passes and waits cover a step but for what reads data and writes the log; without passes they do not."""
    steps = measured[0][1:]
    shares = [explained_share(pair) for pair in pairwise(steps)]
    bare = [explained_share([Timeline(step.spans) for step in pair]) for pair in pairwise(steps)]
    assert max(shares) > 0.7
    assert all(0 < without < share <= 1 for without, share in zip(bare, shares))


def test_the_trace_has_them(measured):
    """Phases are slices of the main lane in the file, and read back; the prediction has forward passes as well."""
    steps, expected, _ = measured
    trace = json.loads(json.dumps(run_trace(steps, expected)))
    lanes = read_trace(trace)
    assert lanes["measured"].phases == tuple(phase for step in steps for phase in step.phases)
    events = [e for e in trace["traceEvents"] if e.get("cat") == "phase"]
    assert {e["name"] for e in events} == {*(f"{kind} {n}" for kind in (FORWARD, BACKWARD) for n in (1, 2, 3)), NORM}
    assert all(e["pid"] == 0 and e["dur"] >= 0 for e in events)
    forward = [s for s in lanes["predicted"].spans if s.op.kind is OpKind.PARAMS_NEEDED and s.seconds > 0]
    assert forward
    assert ">" in draw_lanes(steps[-1]).splitlines()[0]


def test_keeping_changes_no_bit(measured):
    """The same run without marks has the same digest."""
    assert train(FLAGS).digest == measured[2]


def test_nothing_is_marked_unless_asked_for():
    """Without `watch` there are no hooks and no marks; a step that was given up leaves none either."""
    marks, chunk = StepMarks(HostDevice(), torch.device("cpu")), torch.nn.Linear(2, 2)
    marks.begin()
    chunk(torch.ones(1, 2)).sum().backward()
    marks.end_of_backward()
    assert marks.take() == () and not chunk._forward_hooks and not chunk._forward_pre_hooks
    marks.watch([chunk])
    marks.watch([chunk])
    assert len(chunk._forward_hooks) == len(chunk._forward_pre_hooks) == 1
    chunk(torch.ones(1, 2))  # no step
    marks.begin()
    chunk(torch.ones(1, 2)).sum().backward()
    marks.begin()
    chunk(torch.ones(1, 2)).sum().backward()
    marks.end_of_backward()
    chunk(torch.ones(1, 2))
    found = marks.take()
    spans = [HostDevice().span(mark.completion) for mark in found]
    phases = phases_of(found, spans, spans[-1].end + 1.0)
    assert [phase.label for phase in phases] == ["forward 1", "backward 1", "norm"]
    assert phases[-1].seconds == pytest.approx(1.0) and marks.take() == ()


def test_a_forward_pass_without_its_waits():
    """What the loop waited for inside its forward pass is no part of it; a predicted one ends where backward begins."""
    wait = Span(Op(OpKind.PARAMS_NEEDED, 0), 5.0, 5.0, 0, 2.0)
    following = Timeline((), (Phase(FORWARD, 0, 4.0, 8.0), Phase(FORWARD, 1, 9.0, 20.0)))
    assert forward_seconds(Timeline((wait,)), following) == pytest.approx(3.0)
    assert forward_seconds(Timeline((wait,)), Timeline(())) == 0.0
    steps = [
        Timeline(step.spans, (Phase(FORWARD, 0, step.norm_end - 0.5, step.norm_end),)) for step in measured_steps(3)
    ]
    predicted = read_trace(run_trace(steps, expectation()))["predicted"]
    work = sorted((s.start, s.end) for s in predicted.lane(Lane.MAIN) if s.seconds > 0)
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(work))


def test_bytes_on_the_device():
    """One counter has resident state and slots in use, another what torch's allocator gave out at the marks."""
    (step,) = measured_steps(1)
    step = Timeline(step.spans, (), ((0.001, 3 << 20), (0.002, 5 << 20)))
    events = [e for e in run_trace([step], expectation())["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    state = [e["args"]["MiB"] for e in events if e["name"] == "GPU bytes"]
    assert min(state) == 0.0 and max(state) > 0  # nothing is resident here
    assert [(e["ts"], e["args"]["MiB"]) for e in events if e["name"] == "GPU bytes allocated"] == [
        (1e3, 3.0),
        (2e3, 5.0),
    ]
    resident = expectation("resident")
    counted = run_trace([resident.timeline(Compute(0.0, 0.001))], resident)["traceEvents"]
    values = [e["args"]["MiB"] for e in counted if e["ph"] == "C" and e["name"] == "GPU bytes"]
    mebibytes = 4 * sum(s.numel for s in resident.layout.subgroups[:4]) * 2.5 / 2**20  # half, split: 10 bytes each
    assert values[0] == values[-1] == pytest.approx(mebibytes)
    assert max(values) > mebibytes
