"""How a run ends on request: it finishes the step, saves, returns 0 on all ranks, and says why in SAVE/status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_status import cost_lines, disk_bytes_per_second, read_status
from tests.checkpoint.cases import MODEL, OFFLOAD, train, words
from tests.rank_pool import RankFailure

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_the_run_cleanly(tmp_path, name):
    """Code 0, a checkpoint of the step that was running, `resumable` in the status; the run can go on from there."""
    save = tmp_path / "save"
    argv = words(MODEL, OFFLOAD, f"--save {save} --save-interval 100000 --exit-signal-handler --train-iters 100000")
    log = tmp_path / "log"
    with open(log, "w") as file:
        run = subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *argv], cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT
        )
        until = time.monotonic() + 120
        while " iteration        3/" not in log.read_text() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert read_status(save)["status"] == "running"
        run.send_signal(signal.Signals[name])
        assert run.wait(timeout=60) == 0, log.read_text()[-2000:]
    status = read_status(save)
    assert status["status"] == "resumable" and status["cause"] == f"{name} was received"
    assert layout.find_checkpoint(save, None)[1] == status["iteration"] >= 3


def test_all_ranks_leave_together(pool, tmp_path):
    """A signal that only one rank has seen stops both after the same step."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-signal-handler")
    assert pool.run(_late_signal, argv, ranks=2) == [4, 4]
    assert read_status(tmp_path)["cause"] == "SIGTERM was received"


def _late_signal(argv):
    import torch.distributed as dist

    from megatron.training import trainer

    original, steps = trainer.train_step, []

    def step(*args, **options):
        steps.append(1)
        if len(steps) == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)

    trainer.train_step = step
    try:
        return train(argv)["iteration"]
    finally:
        trainer.train_step = original


def _late_clock(argv, steps):
    """Train while the clock of rank 1 alone passes the minute during step number `steps`."""
    from unittest import mock

    import torch.distributed as dist

    from megatron.training import lifecycle, trainer

    clock, done = mock.Mock(monotonic=lambda: lifecycle.STARTED + seconds()), []

    def seconds():
        return 61.0 if dist.get_rank() == 1 and len(done) >= steps else 59.0

    def step(*args, **options):
        done.append(1)
        return original(*args, **options)

    original = trainer.train_step
    with mock.patch.object(trainer, "train_step", step), mock.patch.object(lifecycle, "time", clock):
        return train(argv)["iteration"]


def test_a_duration_that_is_over_ends_all_ranks_together(pool, tmp_path):
    """The ranks' clocks may disagree: when the first is over the minute, both stop after the same step and save it."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-duration-in-mins 1")
    assert pool.run(_late_clock, argv, 3, ranks=2) == [3, 3]
    assert read_status(tmp_path) == {
        "code": 0,
        "status": "resumable",
        "cause": "--exit-duration-in-mins 1 is over",
        "iteration": 3,
    }
    assert layout.find_checkpoint(tmp_path, None)[1] == 3


def test_a_duration_ends_the_program_cleanly(tmp_path):
    """In a process of its own, whose clock runs fast: code 0, the iteration's checkpoint, and the run can go on."""
    save = tmp_path / "save"
    argv = words(MODEL, OFFLOAD, f"--save {save} --save-interval 100000 --train-iters 100000 --exit-duration-in-mins 1")
    code = (
        "import runpy, sys, time, types; from megatron.training import lifecycle\n"
        "began = time.monotonic()\n"
        "fast = lambda: lifecycle.STARTED + (time.monotonic() - began) * 10\n"
        "lifecycle.time = types.SimpleNamespace(monotonic=fast)\n"
        "sys.argv[0] = 'pretrain_gpt.py'; runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    status = read_status(save)
    assert (status["status"], status["code"]) == ("resumable", 0)
    assert status["cause"] == "--exit-duration-in-mins 1 is over"
    assert layout.find_checkpoint(save, None)[1] == status["iteration"] >= 1
    assert f"training stops after iteration {status['iteration']}: --exit-duration-in-mins 1 is over" in done.stdout


def test_intervals_and_the_end_are_told_apart(pool, tmp_path):
    """--exit-interval is resumable, the last iteration is finished, and a fault says so."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 2 --keep-last 2 --train-iters 9")
    pool.run(train, [*argv, "--exit-interval", "5"], ranks=1)
    assert read_status(tmp_path) == {
        "code": 0,
        "status": "resumable",
        "cause": "iteration 5 is a multiple of --exit-interval 5",
        "iteration": 5,
    }
    assert layout.complete_iterations(tmp_path) == [4, 5]
    pool.run(_to_the_end, [*argv, "--load", str(tmp_path)], ranks=1)
    assert read_status(tmp_path)["status"] == "finished"
    assert layout.complete_iterations(tmp_path) == [8, 9]


def _to_the_end(argv):
    from tests.checkpoint.cases import Run

    run = Run(argv)
    run.train()
    run.trainer.finish()
    run.close()


def test_a_run_whose_last_save_failed_is_no_success(pool, tmp_path):
    """Training goes on when a save fails; at the end the run fails loudly."""
    (tmp_path / "save").mkdir()
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path / 'save'} --save-interval 2 --train-iters 6")
    lines = pool.run(_broken_saves, argv, 3, ranks=1)[0]
    assert sum("was NOT saved" in line for line in lines) == 1
    assert any("iteration        6/" in line for line in lines)
    with pytest.raises(RankFailure, match="RuntimeError: the last checkpoint could not be saved"):
        pool.run(_broken_saves, argv, 99, ranks=1)


def _broken_saves(argv, until):
    from megatron.training import checkpointing_save
    from tests.checkpoint.cases import Run

    run = Run(argv)
    original = checkpointing_save.write_own

    def broken(folder, items):
        if run.trainer.state.iteration < until:
            raise OSError(28, "No space left on device")
        return original(folder, items)

    checkpointing_save.write_own = broken
    try:
        run.train()
        run.trainer.finish()
    finally:
        checkpointing_save.write_own = original
        run.close()
    return run.lines


def test_costs_are_said_before_the_first_step(tmp_path):
    """Seconds at the measured speed; a warning where torchrun would kill the save, one where room is lacking."""
    assert disk_bytes_per_second(tmp_path, 4 << 20) > 1e6
    assert not list(tmp_path.iterdir())
    lines = cost_lines(tmp_path, 1 << 30, 1e9, None, True)
    assert len(lines) == 1 and "about 1.1 s at the 1.00 GB/s" in lines[0]
    lines = cost_lines(tmp_path, 280 << 30, 3e9, 2, True)
    assert "torchrun kills all ranks 30 s after a signal and a save takes about 100 s" in lines[1]
    assert "and 3 checkpoints" in cost_lines(tmp_path, 1 << 60, 1e30, 2, False)[-1]
