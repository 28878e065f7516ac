"""A real training run with --run-dir: its record, its trace, its log line, its report and what recording costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deep_offload.plan.ops import Lane, OpKind
from deep_offload.report import report_html
from deep_offload.report_run import read_run
from deep_offload.runtime.worker import SubgroupWorker
from tests.optimizer.loop_cases import train
from tests.report.run_files import expectation, measured_steps, parts_drawn

ROOT = Path(__file__).resolve().parents[2]
RUN = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-3 --bf16 --mock-data --tokenizer-type NullTokenizer
 --vocab-size 1000 --log-interval 1 --eval-interval 3 --eval-iters 1 --interleaved-offload --offload-resident-fraction 0
 --offload-gpu-share 0.5 --offload-trace-steps 3 --save-interval 3"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, printed lines) of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    environment = dict(os.environ, OMP_NUM_THREADS="1", DEEP_OFFLOAD_CACHE=str(folder / "cache"))
    trace = folder / "new" / "folder" / "trace.json"
    words = [*RUN.split(), "--run-dir", str(folder / "run"), "--offload-trace", str(trace)]
    words += ["--save", str(folder / "ckpt")]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "run", result.stdout


def test_every_event_is_written(trained):
    """A start with command, settings and prediction, a line a step, evaluations, checkpoints and an end."""
    run = read_run(trained[0])
    assert [step["iteration"] for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert "pretrain_gpt.py --num-layers 2" in run.start["command"]
    assert run.start["config"]["model"]["hidden_size"] == 64
    assert run.start["predicted"]["update_seconds"] > 0 and run.start["state_bytes"]["host"] > 0
    assert [e["iteration"] for e in run.of_kind("checkpoint")] == [3, 6]
    assert {e["split"] for e in run.of_kind("evaluation")} == {"validation", "test"}
    assert run.status == "finished" and run.num_broken == 0
    last = run.steps[-1]
    assert last["losses"]["lm loss"] > 0 and last["grad_norm"] > 0 and last["memory"]["host_peak"] > 2**20


def test_what_is_predicted_is_in_the_start(trained):
    """An iteration's time, and bytes: those of the state are what the engine then holds."""
    start = read_run(trained[0]).start
    planned, held = start["planned_bytes"], start["state_bytes"]
    assert start["predicted"]["iteration_seconds"] > start["predicted"]["update_seconds"] > 0
    assert planned["host"] == pytest.approx(held["host"], rel=0.03)
    assert 0 < held["device"] <= planned["device"] < planned["device_total"]


def test_the_log_says_which_steps_a_trace_has(trained):
    """It names the file, whose folder was made, how many steps, and the last one's update."""
    line = next(line for line in trained[1].splitlines() if line.startswith("> wrote "))
    path = trained[0].parent / "new" / "folder" / "trace.json"
    assert line.startswith(f"> wrote the lanes of the last 3 steps to {path}: last update ")
    assert path.read_text() == (trained[0] / "trace.json").read_text()


def test_the_log_says_how_near_the_bound(trained):
    """The log line names the update's time, its share of the bound and the lane that sets it."""
    lines = [line for line in trained[1].splitlines() if " iteration " in line and "lm loss" in line]
    assert any("% of bound, bound by" in line for line in lines[1:])
    update = next(step["update"] for step in read_run(trained[0]).steps if step["update"])
    assert update["lane"] in ("cpu", "gpu", "h2d", "d2h", "dram") and update["share_of_bound"] > 0
    assert 0 < update["attributed"] <= 1 and set(update["busy"]) == {"cpu", "gpu", "h2d", "d2h", "dram"}


def test_three_steps_of_lanes(trained):
    """The trace holds three steps on one clock, each with all lanes, and as many predictions."""
    lanes = read_run(trained[0]).lanes
    for name in ("measured", "predicted"):
        norms = [s.end for s in lanes[name].spans if s.op.kind is OpKind.NORM_READY]
        assert len(norms) == 3 and norms == sorted(norms)
        assert all(lanes[name].lane(lane) for lane in Lane)
    events = json.loads((trained[0] / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "wait" for event in events)


def test_parts_of_a_real_iteration_add_up(monkeypatch, tmp_path):
    """One rank waits for slow uploads inside its forward passes, whose timer goes on meanwhile."""
    upload = SubgroupWorker.param_h2d
    monkeypatch.setattr(SubgroupWorker, "param_h2d", lambda self, op: time.sleep(0.02) or upload(self, op))
    train(f"--bf16 --train-iters 5 --timing-log-level 1 --run-dir {tmp_path} --offload-gpu-share 0")
    run = read_run(tmp_path)
    assert run.start["waits_in_passes"] is True
    drawn, sums = parts_drawn(run, monkeypatch)
    seconds = [step["seconds"] for step in run.steps[1:]]
    assert sums == pytest.approx([1e3 * own for own in seconds])
    assert max(drawn["waiting for the update"]) > 50.0


def test_a_real_run_makes_a_report(trained):
    """The page of the run has its eight charts."""
    assert report_html(read_run(trained[0])).count("<svg") == 8


def test_recording_a_step_costs_little():
    """Judging the lanes of a logged step takes less than 0.5 % of a step of half a second."""
    expected, step = expectation(), measured_steps(1)[0]
    expected.judge(step)
    started = time.process_time()
    for _ in range(20):
        expected.judge(step)
    assert (time.process_time() - started) / 20 < 0.0025
