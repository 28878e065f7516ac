"""Runs on paper, as `--run-dir` would have written them: quick to make, and with every kind of event."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.simulator import simulate
from deep_offload.model.trace import Expectation, run_trace, shifted
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from deep_offload.plan.timeline import BACKWARD, FORWARD, Phase, Timeline
from deep_offload.report import report_html
from deep_offload.report_run import RunData

HOSTILE = "<script>alert(\"x\")</script> & 'quotes'"


def expectation(rest: str = "gpu") -> Expectation:
    """Half of 8 subgroups streamed; with rest="resident" four of them stay on the GPU, half of the others streamed."""
    profile, state = BUILT_IN_PROFILES["h200"], StateFormat(True, "param")
    layout = build_layout([ShardSpec(8 << 20, 2, 2)], 1 << 20)
    placement = place_by_share(8, 0.5)
    if rest == "resident":
        placement = (Place.RESIDENT,) * 4 + placement[4:]
    plan = build_plan(layout, placement, 4, op_seconds(layout, state, profile))
    return Expectation(plan, layout, state, profile, 1, 0.0015, "dram")


def measured_steps(count: int = 3):
    expected = expectation()
    played = simulate(expected.plan, expected.layout, expected.state, expected.profile, backward_seconds=0.002)
    norm = played.timeline.norm_end
    phases = (Phase(FORWARD, 0, norm - 0.004, norm - 0.002), Phase(BACKWARD, 0, norm - 0.002, norm))
    return [shifted(Timeline(played.timeline.spans, phases), 0.01 * i) for i in range(count)]


def start(**changes: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "time": 1.7e9,
        "command": f"python pretrain_gpt.py --data-path '{HOSTILE}'",
        "environment": {
            "host": "node",
            "gpu": None,
            "packages": {"torch": "2.13"},
            "variables": {"NCCL_DEBUG": "WARN"},
        },
        "config": {"model": {"num_layers": 2, "hidden_size": 64, "note": HOSTILE}, "lr": {"lr": 1e-3}},
        "num_iterations": 40,
        "world_size": 1,
        "placement": ["optimizer state: 8 subgroups", HOSTILE],
        "predicted": {
            "update_seconds": 0.0015,
            "iteration_seconds": 0.09,
            "binding_lane": "dram",
            "profile": "h200",
            "profile_source": "tests",
        },
        "state_bytes": {"host": 10**8, "device": 10**7},
        "planned_bytes": {"host": 102 * 10**6, "device": 10**7, "device_total": 600 << 20},
    } | changes


def step(iteration: int, **changes: Any) -> dict[str, Any]:
    facts = {"seconds": 0.002, "share_of_bound": 0.8, "lane": "dram", "attributed": 0.97, "in_place_seconds": 0.0018}
    busy = {"cpu": 0.8, "gpu": 0.1, "h2d": 0.4, "d2h": 0.3, "dram": 0.9}
    return {
        "event": "step",
        "time": 1.7e9 + iteration,
        "iteration": iteration,
        "samples": 4 * iteration,
        "losses": {"lm loss": 7 * math.exp(-iteration / 20) + 2},
        "learning_rate": 1e-3 * (1 - iteration / 40),
        "grad_norm": 1.0 + 0.1 * (iteration % 3),
        "loss_scale": 1.0,
        "skipped": 0,
        "nan": 0,
        "seconds": 0.1,
        "tflops": None,
        "wait_seconds": 0.02,
        "update": {**facts, "busy": busy},
        "times": {"forward-backward": 0.07, "optimizer": 0.001},
        "memory": {"host_peak": 2**30 + iteration, "device": 2**28, "device_peak": 2**29},
    } | changes


def whole_run() -> list[dict[str, Any]]:
    events = [start(), {"event": "note", "time": 1.7e9, "text": f"UserWarning: {HOSTILE}"}]
    for iteration in range(1, 41):
        events.append(step(iteration))
        if iteration % 10 == 0:
            events.append(
                {"event": "evaluation", "iteration": iteration, "split": "validation", "losses": {"lm loss": 4.0}}
            )
            events.append({"event": "checkpoint", "iteration": iteration, "seconds": 0.5})
    # The evaluation of the run's end, on other batches than the one before it.
    events.append({"event": "evaluation", "iteration": 40, "split": "validation", "losses": {"lm loss": 3.5}})
    return [*events, {"event": "end", "time": 1.7e9 + 41, "stop_reason": None, "seconds": 41.0, "traffic": {}}]


def write_run(folder: Path, events: list[dict[str, Any]], *, with_trace: bool = True, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    if with_trace:
        (folder / "trace.json").write_text(json.dumps(run_trace(measured_steps(), expectation())))
    return folder


def parts_drawn(run: RunData, monkeypatch: Any) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds of iterations as the page draws them: by part, and all parts of each iteration together."""
    report_charts = importlib.import_module("deep_offload.report_charts")  # needs matplotlib
    drawn: dict[str, list[float]] = {}
    draw = report_charts.stacked_chart

    def watched(name: str, xs: list[int], parts: dict[str, list[float]], unit: str) -> str:
        drawn.update(parts)
        return draw(name, xs, parts, unit)

    monkeypatch.setattr(report_charts, "stacked_chart", watched)
    report_html(run)
    return drawn, [sum(values) for values in zip(*drawn.values())]
