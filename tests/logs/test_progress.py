"""How far a run is: the line on a terminal, SAVE/progress.txt, throughput."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import sys
import threading
import time
from datetime import datetime

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training import progress, train_step
from megatron.training.flops import flops_per_step
from megatron.training.progress import ProgressFile, ProgressLine, gpu_seconds, remaining
from megatron.training.side_files import SideFiles
from megatron.training.training import pretrain
from tests.training.runs import LLAMA, SINGLE, log_lines, run, settings

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    "seconds, text", [(0, "00:00:00"), (3661.4, "01:01:01"), (86399, "23:59:59"), (200000, "2d 07:33:20")]
)
def test_remaining_time(seconds, text):
    """Durations read as hours, minutes and seconds, with days in front where there are any."""
    assert remaining(seconds) == text


def test_line_on_a_terminal(clock):
    """The line shows step, part, loss, seconds a step and the time left, and goes away before other lines."""
    stream = Terminal()
    line = ProgressLine(stream, {"TERM": "xterm"}, 1000)
    line.show(10, 2.5)
    assert stream.getvalue() == "\r\x1b[K 10/1000 (1.0 %) | loss 2.5000\r"
    clock[0] += 30.0
    line.show(20, math.nan)
    assert stream.getvalue().endswith(" 20/1000 (2.0 %) | loss nan | 3.00 s a step | 00:49:00 left\r")
    clock[0] += 0.1
    line.show(21, 2.0)
    assert "21/1000" not in stream.getvalue(), "a few times a second are enough"
    line.erase()
    assert stream.getvalue().endswith("left\r\r\x1b[K")
    before = stream.getvalue()
    line.erase()
    assert stream.getvalue() == before


@pytest.mark.parametrize("stream, env", [(io.StringIO(), {"TERM": "xterm"}), (Terminal(), {"TERM": "dumb"})])
def test_no_line_elsewhere(stream, env):
    """Files, pipes and dumb terminals see no progress line."""
    line = ProgressLine(stream, env, 10)
    line.show(1, 1.0)
    line.erase()
    assert stream.getvalue() == ""


def read_all(descriptor, parts):
    """Read a pseudo terminal until its other end closes."""
    try:
        while data := os.read(descriptor, 1 << 16):
            parts.append(data)
    except OSError:  # how Linux says that nobody writes any more
        return


def test_run_on_a_terminal(monkeypatch):
    """A run whose output is a terminal draws the line and keeps every log line whole."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    parts: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(leader, parts))
    reader.start()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        pretrain(settings("--train-iters 4 --log-interval 2"), SINGLE)
        monkeypatch.undo()
    reader.join(30)
    os.close(leader)
    output = b"".join(parts).decode().replace("\r\n", "\n")
    assert re.search(r"\r\x1b\[K \d/4 \(\d+\.0 %\) \| loss \d\.\d{4}", output)
    assert len(log_lines(output.replace("\r\x1b[K", "\n").replace("\r", "\n"))) == 3


def test_progress_file(tmp_path):
    """--log-progress notes each start and each checkpoint, with work and tokens of the whole training."""
    words = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --log-progress --lr-decay-iters 9"
    run(f"{words} --train-iters 4")
    run(f"{words} --train-iters 6")
    rows = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row[0]) and row[2] == "# GPUs: 1" for row in rows)
    assert [row[3] for row in rows] == ["Starting job", *["Saved checkpoint"] * 2, "Starting job", "Saved checkpoint"]
    assert [row[4] for row in rows if len(row) > 4] == ["Iteration: 2", "Iteration: 4", "Iteration: 6"]
    flops = flops_per_step(settings("--train-iters 1").model, 128, 6 * 4)
    assert rows[-1][7] == f"Floating-point operations: {flops:.2e}"
    assert re.fullmatch(r"Job throughput: \d+\.\d TFLOP/s/GPU", rows[-1][5])


def test_a_progress_file_that_cannot_be_written_ends_no_run(tmp_path):
    """Here a directory has its name: one line says so for two starts and checkpoints, which are saved all the same."""
    (tmp_path / "progress.txt").mkdir()
    output = run(f"--save {tmp_path} --save-interval 2 --log-progress --train-iters 4")
    said = [line for line in output.splitlines() if "progress.txt" in line]
    assert said == [
        f"WARNING: {tmp_path}/progress.txt could not be written (Is a directory); training goes on without it"
    ]
    assert len(log_lines(output)) == 4 and (tmp_path / "iter_0000004").is_dir()


def test_progress_goes_on_when_there_is_room_again(tmp_path):
    """A full disk is said once; what comes later is written again."""
    said: list[str] = []
    file = ProgressFile(str(tmp_path), 2, {}, SideFiles(said.append))
    path = tmp_path / "progress.txt"
    path.symlink_to("/dev/full")
    file.started(0.0)
    file.started(0.0)
    assert said == [f"WARNING: {path} could not be written (No space left on device); training goes on without it"]
    path.unlink()
    file.saved(3, 1e12, 1000)
    assert "\tSaved checkpoint\tIteration: 3\t" in path.read_text() and len(said) == 1


def test_progress_file_needs_a_place():
    """--log-progress without --save is refused before anything starts."""
    with pytest.raises(ValueError, match="--log-progress writes SAVE/progress.txt: add --save"):
        settings("--train-iters 1 --log-progress")


def test_gpu_seconds_of_all_jobs():
    """Jobs before count until their last checkpoint times their GPUs, the last one until now."""
    text = (
        "2026-01-01 00:00:00\tJob ID: 1\t# GPUs: 4\tStarting job\n"
        "2026-01-01 00:01:40\tJob ID: 1\t# GPUs: 4\tSaved checkpoint\tIteration: 5\n"
        "2026-01-02 00:00:00\tJob ID: \t# GPUs: 2\tStarting job\n"
    )
    assert gpu_seconds(text, datetime(2026, 1, 2, 0, 0, 10)) == 4 * 100 + 2 * 10
    assert gpu_seconds("", datetime(2026, 1, 1)) == 0


@pytest.mark.parametrize("recompute", ["", "--recompute-granularity full --recompute-method uniform"])
def test_throughput_counts_the_model(monkeypatch, recompute):
    """The formula equals torch's own count for a GQA model; what is computed again is not in it."""
    counted = []
    plain = train_step.run_schedule

    def counting(*arguments, **names):
        with FlopCounterMode(display=False) as counter:
            reports = plain(*arguments, **names)
        counted.append(counter.get_total_flops())
        return reports

    monkeypatch.setattr(train_step, "run_schedule", counting)
    run(f"{LLAMA} --train-iters 1 {recompute}")
    model = settings(f"{LLAMA} --train-iters 1").model
    batch, seq, queries = 4, model.seq_length, model.num_attention_heads * model.kv_channels
    # Scores and values, forward and backward, of the half that is not masked; torch does not count the CPU's kernel.
    attention = 3 * 2 * model.num_layers * batch * queries * seq * seq
    matrices = flops_per_step(model, 128, batch) - attention
    layers = matrices - 3 * 2 * batch * seq * model.hidden_size * 128
    assert counted == [matrices + (layers / 3 if recompute else 0)]


def test_throughput_of_a_run(monkeypatch):
    """The printed figure is the formula over the printed time."""
    output = run(f"{LLAMA} --train-iters 2 --log-throughput", "--mock-data")
    assert [line["tflops"] for line in log_lines(output)] == ["0.0", "0.0"]
    model = settings(f"{LLAMA} --train-iters 1").model
    assert flops_per_step(model, 128, 8) == 2 * flops_per_step(model, 128, 4) > 0


def test_nan_loss_is_printed(monkeypatch):
    """A step whose loss is NaN prints NAN in its line and counts."""
    plain, calls = train_step.mean, []

    def sometimes(total, num_tokens):
        calls.append(total)
        return math.nan if len(calls) == 2 else plain(total, num_tokens)

    monkeypatch.setattr(train_step, "mean", sometimes)
    lines = log_lines(run("--train-iters 3"))
    assert [line["loss"] == "NAN" for line in lines] == [False, True, False]
    assert [int(line["nan"]) for line in lines] == [0, 1, 0]


def test_fast_steps_do_not_divide_by_zero():
    """Two steps at the same moment leave a finite time."""
    stream = Terminal()
    line = ProgressLine(stream, {}, 3)
    line.show(1, None)
    time.sleep(0.21)
    line.show(1, None)
    assert "s a step" not in stream.getvalue()
    assert torch.get_num_threads() >= 1
