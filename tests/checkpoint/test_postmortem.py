"""What a run leaves when a number is not finite, when it fails, and when the kernel kills it for want of memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.training.arguments import build_config
from megatron.training.host_memory import HostMemory, read_host_memory
from megatron.training.memory_watch import verdict
from megatron.training.postmortem import PostMortem
from tests.checkpoint.cases import MODEL, OFFLOAD, words

REPOSITORY = Path(__file__).resolve().parents[2]


def _train_with_a_bad_gradient(argv, step, bad):
    """Put `bad` into one gradient of a layer at a step; returns log lines and whether all state stayed finite."""
    from megatron.training import postmortem, trainer
    from tests.checkpoint.cases import Run

    run = Run(argv)
    pm = postmortem.PostMortem(run.config, run.trainer.ranks.rank, ["pretrain_gpt.py", *argv])
    run.trainer._print = pm.keep(run.lines.append)
    run.trainer._postmortem = pm
    original, steps = trainer.train_step, []

    def broken(forward, iterators, chunks, optimizer, batches):
        steps.append(1)
        step_of = type(optimizer).step

        def poisoned(self):
            if len(steps) == step:
                weights = dict(chunks[0].module.named_parameters())
                name = next(n for n in weights if n.endswith("layers.2.mlp.linear_fc2.weight"))
                weights[name].main_grad.view(-1)[:].fill_(bad)
            return step_of(self)

        type(optimizer).step = poisoned
        try:
            return original(forward, iterators, chunks, optimizer, batches)
        finally:
            type(optimizer).step = step_of

    trainer.train_step = broken
    try:
        run.train()
    finally:
        trainer.train_step = original
    finite = all(
        bool(torch.isfinite(run.optimizer.param_state.read(r, kind, r.start, r.end)).all())
        for r in run.optimizer.param_state.ranges()
        for kind in ("master", "exp_avg", "exp_avg_sq")
    )
    run.close()
    return run.lines, finite


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_leaves_a_directory(pool, tmp_path, ranks):
    """The update is skipped, state stays finite, training goes on; what, where and the replay are in the directory."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 2 --exit-interval 5")
    results = pool.run(_train_with_a_bad_gradient, argv, 3, float("nan"), ranks=ranks)
    assert all(finite for _, finite in results)
    lines = results[0][0]
    assert len([line for line in lines if "WARNING: iteration 3 was not finite: see" in line]) == 1
    (folder,) = tmp_path.glob("postmortem_*_nonfinite_iteration3")
    report = (folder / "report.txt").read_text()
    assert "first bad parameter: decoder.layers.2.mlp.linear_fc2.weight" in report
    assert "samples: 8 to 11 of the training order" in report
    assert "host memory: " in report and "planned optimizer state: " in report
    replay = next(line for line in report.splitlines() if line.startswith("replay: "))
    assert f"--load {tmp_path} --ckpt-step 2" in replay and "--exit-interval 3" in replay and "--save" not in replay
    assert "iteration        2/" in (folder / "log.txt").read_text()
    assert '"hidden_size": 32' in (folder / "settings.json").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_directory_that_cannot_be_written_ends_no_run(pool, tmp_path, ranks):
    """As on a full disk: one line names it and says why, and all later steps are done."""
    save = tmp_path / "save"
    save.write_text("a file where the directory should be")
    argv = words(MODEL, OFFLOAD, f"--save {save} --save-interval 100 --train-iters 5")
    results = pool.run(_train_with_a_bad_gradient, argv, 3, float("nan"), ranks=ranks)
    assert all(finite for _, finite in results)
    (said,) = [line for line in results[0][0] if "iteration 3 was not finite" in line]
    assert re.fullmatch(
        rf"WARNING: iteration 3 was not finite: {save}/postmortem_\S+_nonfinite_iteration3 could not be written "
        r"\(Not a directory\); training goes on without it",
        said,
    )
    assert any("iteration        5/" in line for line in results[-1][0])


def test_an_overflow_of_fp16_leaves_nothing(pool, tmp_path):
    """A dynamic loss scale finds its value by overflowing."""
    model = MODEL.replace("--bf16", "--fp16")
    argv = words(model, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-interval 4")
    pool.run(_train_with_a_bad_gradient, argv, 3, float("inf"), ranks=1)
    assert not list(tmp_path.glob("postmortem_*"))


def test_an_error_leaves_a_directory(tmp_path):
    """A lane's exception ends the run with code 1, `failed` in the status and a directory."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 2")
    code = (
        "import sys, runpy; from megatron.training import trainer as t; f = t.train_step; n = []\n"
        "def broken(*a):\n"
        "    n.append(1)\n"
        "    if len(n) == 4: raise RuntimeError('lane cpu failed')\n"
        "    return f(*a)\n"
        "t.train_step = broken; sys.argv[0] = 'pretrain_gpt.py'; runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr[-2000:]
    (folder,) = tmp_path.glob("postmortem_*_error_rank0")
    assert f"ERROR: rank 0: what was known is in {folder}" in done.stderr
    report = (folder / "report.txt").read_text()
    assert "cause: RuntimeError in iteration 4: lane cpu failed" in report and "--ckpt-step 2" in report
    assert '"failed"' in (tmp_path / "status").read_text()
    assert "host memory (GiB): " in (folder / "log.txt").read_text()
    assert not list(tmp_path.glob("killed_*")), "the watcher took a failure for a kill"


@pytest.mark.parametrize(
    ("flags", "words_of_advice"),
    [
        ("--interleaved-offload", "what seemed to fit: give --offload-device-budget-gib with less than that"),
        (OFFLOAD, "staging slots: lower --offload-device-budget-gib (or --offload-resident-fraction"),
        ("", "are optimizer state: add --interleaved-offload, and --offload-device-budget-gib"),
    ],
)
def test_gpu_memory_that_runs_out_names_the_budget(tmp_path, flags, words_of_advice):
    """The cause and the flag that gives the model more room, with the bytes that the optimizer takes."""
    config = build_config(words(MODEL, flags, f"--save {tmp_path} --save-interval 2"), world_size=1)
    post = PostMortem(config, 1, ["pretrain_gpt.py"])
    post.plan(lambda: (1 << 30, 3 << 29))
    folder = post.on_error(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 6)
    report = (folder / "report.txt").read_text()
    assert "cause: out of GPU memory in iteration 7: CUDA out of memory. Tried to allocate 2.00 GiB." in report
    assert "advice: GPU memory ran out, 1.50 GiB of it" in report and words_of_advice in report
    assert post.advice(RuntimeError("lane cpu failed")) is None


def _victim(folder: Path, grow: bool) -> str:
    return (
        "import time; from pathlib import Path; from megatron.training.memory_watch import MemoryWatch\n"
        f"w = MemoryWatch(3, 5 << 30, Path({str(folder)!r})); time.sleep(2); kept = []\n"
        f"while {grow}:\n    kept.append(bytearray(8 << 20)); time.sleep(0.03)\n"
        "print('ready', flush=True); time.sleep(60)"
    )


def test_a_killed_process_is_reported(tmp_path):
    """kill -9 of a rank: its watcher says which rank, how large it was and what was planned."""
    run = subprocess.Popen([sys.executable, "-c", _victim(tmp_path, False)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    text = _wait_for(tmp_path / "killed_rank3.txt")
    assert "rank 3 ended without a word" in text and "the plan was 5.000 GiB" in text
    assert "its last resident size was 0.0" in text and "size was 0.000" not in text


def test_a_process_killed_for_memory_is_reported(tmp_path):
    """Under a real limit of the kernel: the watcher names memory, the limit and what to do."""
    group = _limited_group()
    code = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid()))\n" + _victim(
        tmp_path, True
    )
    try:
        run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=120)
        assert run.returncode == -signal.SIGKILL
        text = _wait_for(tmp_path / "killed_rank3.txt")
        assert "rank 3 was killed by the kernel because host memory ran out" in text
        assert "the limit is 0.125 GiB for all" in text and "the plan was 5.000 GiB" in text
    finally:
        time.sleep(1)
        group.rmdir()


def _limited_group() -> Path:
    """A control group of its own with 128 MiB; skips where none can be made."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"deep_offload_test_{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(128 << 20))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    pytest.skip("a memory limit needs a writable control group")


def _wait_for(path: Path) -> str:
    until = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.1)
    return path.read_text()


def test_memory_is_read_from_control_groups(tmp_path):
    """The smallest limit on the way up counts; a process that is gone has none."""
    mine = read_host_memory()
    assert mine.peak >= mine.resident > 1 << 20
    gone = read_host_memory(2**30)
    assert (gone.resident, gone.limit, gone.num_kills) == (0, None, 0)
    before = HostMemory(0, 0, 0, 1 << 30, 4)
    assert "killed by the kernel" in verdict("0", before, before, 5, 0)
    assert "killed by the kernel" not in verdict("0", before, before, 4, 0)
