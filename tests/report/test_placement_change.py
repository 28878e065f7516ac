"""A placement that changes while a run goes on: written once, shown beside the first, compared with its own steps."""

from __future__ import annotations

import json
import re

import pytest

from deep_offload.report_run import read_run
from tests.optimizer.loop_cases import train
from tests.optimizer.residency_cases import PLENTY, paper_gpu
from tests.report.run_files import start, step, write_run


def change(iteration: int) -> dict:
    predicted = {"update_seconds": 0.0004, "binding_lane": "gpu", "profile": "h200", "profile_source": "tests"}
    return start(
        event="placement",
        iteration=iteration,
        placement=["optimizer state: 8 resident"],
        predicted=predicted,
        state_bytes={"host": 10**8, "device": 7 * 2**30},
    )


def test_report_of_a_change(tmp_path):
    """Both placements are listed; bytes are the last one's, and its prediction meets updates since then only."""
    pytest.importorskip("matplotlib", reason="reports are drawn by matplotlib")
    from deep_offload.report import report_html

    fast = {"in_place_seconds": 0.0005, "seconds": 0.0005}
    steps = [step(i) for i in range(1, 11)]
    later = [step(i) for i in range(11, 15)]
    for event in later:
        event["update"] |= fast
    run = read_run(write_run(tmp_path / "run", [start(), *steps, change(11), *later], with_trace=False))
    assert run.placed["iteration"] == 11 and [s["iteration"] for s in run.placed_steps] == [11, 12, 13, 14]
    page = report_html(run)
    assert len(re.findall(r"<h3>from ", page)) == 2
    for part in ("optimizer state: 8 subgroups", "optimizer state: 8 resident", "7.00 GiB", "0.4 ms", "-20 %"):
        assert part in page, part
    resumed = read_run(write_run(tmp_path / "again", [start(), *steps, change(11), start(), *later], with_trace=False))
    assert resumed.placed["event"] == "start" and [s["iteration"] for s in resumed.placed_steps] == [11, 12, 13, 14]


def test_a_run_writes_its_change_once(tmp_path, monkeypatch):
    """The line of the log, new prediction and new bytes are in the record before the first step they hold for."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path / "cache"))
    with paper_gpu(1, PLENTY):
        train(f"--bf16 --train-iters 6 --offload-resident-fraction auto --run-dir {tmp_path / 'run'}")
    run = read_run(tmp_path / "run")
    kinds = [e["event"] for e in run.events if e["event"] in ("start", "placement", "step")]
    assert kinds == ["start", "step", "step", "step", "placement", "step", "step", "step"]
    placed = run.placed
    assert placed["iteration"] == 4 and any("placement changed after 3 steps" in line for line in placed["placement"])
    assert placed["predicted"] != run.start["predicted"]
    assert placed["state_bytes"]["device"] > run.start["state_bytes"]["device"]
    assert json.dumps(placed)
