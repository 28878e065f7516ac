"""--rerun-mode: a result that cannot be right is computed again, and the run ends with code 16 or 17."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_status import read_status
from tests.checkpoint import rerun_cases
from tests.checkpoint.cases import MODEL, OFFLOAD, words
from tests.checkpoint.rerun_cases import train

REPOSITORY = Path(__file__).resolve().parents[2]
NAN = float("nan")
MIXED = OFFLOAD + " --offload-gpu-share 0.5 --offload-subgroup-numel 2000"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CHECKS = "--rerun-mode validate_results --check-for-spiky-loss"

# A rank sees the four micro-batches of a step, or two of four with two data-parallel ranks.
LAYOUTS = {
    "one": (1, "", 4),
    "dp2": (2, "--overlap-grad-reduce --overlap-param-gather", 2),
    "pp2": (2, "--pipeline-model-parallel-size 2", 4),
}


def _argv(*more: str, steps: int = 7) -> list[str]:
    return words(MODEL, MIXED, DROPOUT, f"--train-iters {steps}", *more)


@pytest.fixture(scope="module")
def plain(pool):
    """Digest and losses of the run in which nothing is wrong, without --rerun-mode, by layout."""
    return {name: pool.run(train, _argv(flags), ranks=ranks) for name, (ranks, flags, _) in LAYOUTS.items()}


@pytest.mark.parametrize("mode", [CHECKS, "--rerun-mode report_stats"], ids=["validate", "stats"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_looking_changes_no_bit(pool, plain, name, mode):
    """Where nothing is wrong, losses and state are those without the flag, even when every step is computed twice."""
    ranks, flags, _ = LAYOUTS[name]
    results = pool.run(train, _argv(flags, mode), ranks=ranks)
    for result, want in zip(results, plain[name], strict=True):
        assert (result["digest"], result["losses"], result["verdict"]) == (want["digest"], want["losses"], None)
    twice = [line for line in results[-1]["lines"] if "computed twice" in line]
    assert len(twice) == (7 if "stats" in mode else 0)
    assert all("lm loss differs by 0.000E+00, grad norm differs by 0.000E+00 (relative)" in line for line in twice)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_transient_spike_leaves_no_trace(pool, plain, name):
    """A loss 1000 times too high, once: the step is computed again from the same batches and random numbers, what the
    first pass flushed is dropped, and the run has the bits of one without the fault."""
    ranks, flags, calls = LAYOUTS[name]
    results = pool.run(train, _argv(flags, CHECKS), (4 * calls + 1, 1e3), ranks=ranks)
    for result, want in zip(results, plain[name], strict=True):
        assert (result["digest"], result["losses"]) == (want["digest"], want["losses"])
    warnings = [line for line in results[-1]["lines"] if "WARNING: iteration 5" in line]
    assert len(warnings) == 2 and "the step is computed again" in warnings[0]
    assert "so the first was a transient fault; training goes on" in warnings[1]


def test_a_spike_that_comes_again_is_kept(pool, plain):
    """It is what the model says: reported, and trained on."""
    result = pool.run(train, _argv(CHECKS), (17, 1e3, 5), ranks=1)[0]
    assert result["iteration"] == 7 and result["verdict"] is None
    assert any("computed again: lm loss is" in line and "again; training goes on" in line for line in result["lines"])
    assert result["digest"] != plain["one"][0]["digest"]


def _keeps_flushed(optimizer):
    pass


def _ignores_random_numbers(self, compute, optimizer, data):
    for iterator in data:
        iterator.rewind()
    return compute()


def _takes_next_batches(self, compute, optimizer, data):
    rerun_cases.without_fresh_batches(data)
    rerun_cases.rerun.set_rng(self._rng)
    return compute()


def _train_keeping_flushed(argv, bad):
    from unittest import mock

    from deep_offload.optimizer.megatron import DeepOffloadOptimizer

    with mock.patch.object(DeepOffloadOptimizer, "drop_gradients", _keeps_flushed):
        return train(argv, bad)


@pytest.mark.parametrize("broken", [_ignores_random_numbers, _takes_next_batches])
def test_a_rerun_that_is_no_rerun_is_noticed(pool, plain, broken):
    """Other random numbers or other batches: other bits."""
    result = pool.run(train, _argv(CHECKS), (17, 1e3), _again=broken, ranks=1)[0]
    assert result["digest"] != plain["one"][0]["digest"]


def test_gradients_that_stay_with_the_lanes_are_noticed(pool, plain):
    """Without dropping what the first pass has flushed the update takes it."""
    ranks, flags, calls = LAYOUTS["dp2"]
    result = pool.run(_train_keeping_flushed, _argv(flags, CHECKS), (4 * calls + 1, 1e3), ranks=ranks)[0]
    assert result["digest"] != plain["dp2"][0]["digest"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_transient_nan_ends_with_17_before_its_step(pool, plain, tmp_path, name):
    """All ranks end together with the state before the step saved; the run that goes on has the bits of one
    without the fault."""
    ranks, flags, calls = LAYOUTS[name]
    argv = _argv(flags, CHECKS, f"--save {tmp_path} --save-interval 100")
    for result in pool.run(train, argv, (4 * calls + 1, NAN), ranks=ranks):
        assert (result["iteration"], result["verdict"].code) == (4, 17)
    status = read_status(tmp_path)
    assert (status["status"], status["code"], status["iteration"]) == ("failed", 17, 4)
    assert "iteration 5: lm loss is nan, and is finite when computed again" in status["cause"]
    assert f"a transient fault of rank {ranks - 1} (one, GPU 0)" in status["cause"]
    resumed = pool.run(train, [*argv, "--load", str(tmp_path)], ranks=ranks)
    for result, want in zip(resumed, plain[name], strict=True):
        assert result["digest"] == want["digest"] and result["losses"] == want["losses"][4:]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_nan_that_stays_is_16_then_16_then_17(pool, tmp_path, name):
    """Twice on one GPU: 16, and the checkpoint asks for another one. There again the same: 17, it is no fault of
    a GPU."""
    ranks, flags, calls = LAYOUTS[name]
    argv = _argv(flags, CHECKS, f"--save {tmp_path} --save-interval 2")
    first = pool.run(train, argv, (4 * calls + 1, NAN, 1000), ranks=ranks)
    assert {(r["iteration"], r["verdict"].code, r["verdict"].saves) for r in first} == {(4, 16, True)}
    assert read_status(tmp_path)["status"] == "resumable" and read_status(tmp_path)["code"] == 16
    assert layout.find_checkpoint(tmp_path, None)[1] == 4
    argv += ["--load", str(tmp_path)]
    same = pool.run(train, argv, (1, NAN, 1000), ranks=ranks)
    assert {(r["iteration"], r["verdict"].code, r["verdict"].saves) for r in same} == {(4, 16, False)}
    assert "this is the same GPU" in read_status(tmp_path)["cause"]
    other = pool.run(train, argv, (1, NAN, 1000), "two", ranks=ranks)
    assert {(r["iteration"], r["verdict"].code, r["verdict"].saves) for r in other} == {(4, 17, False)}
    assert "on another GPU too: it comes from data, settings or code" in read_status(tmp_path)["cause"]
    assert any("the checkpoint was saved because of iteration 5: lm loss is nan" in r for r in other[0]["lines"])


def test_a_gpu_that_is_wrong_is_found(pool, plain, tmp_path):
    """The result is finite on the other GPU: 17 names the first; without the flag the run goes on as if nothing was."""
    argv = _argv(f"--save {tmp_path} --save-interval 100")
    pool.run(train, [*argv, *CHECKS.split()], (17, NAN, 1000), ranks=1)
    argv += ["--load", str(tmp_path)]
    result = pool.run(train, [*argv, *CHECKS.split()], None, "two", ranks=1)[0]
    assert result["verdict"].code == 17
    assert "but not on another GPU: keep those of rank 0 (one, GPU 0) out" in result["verdict"].cause
    result = pool.run(train, argv, None, "two", ranks=1)[0]
    assert (result["digest"], result["verdict"]) == (plain["one"][0]["digest"], None)
    assert any("WARNING: the checkpoint was saved because of iteration 5" in line for line in result["lines"])


def test_the_first_step_of_a_run_is_looked_at_too(pool, tmp_path):
    """A checkpoint of iteration 0 is written, and loads."""
    argv = _argv(CHECKS, f"--save {tmp_path} --save-interval 100")
    result = pool.run(train, argv, (1, NAN, 1000), ranks=1)[0]
    assert (result["iteration"], result["verdict"].code) == (0, 16)
    result = pool.run(train, [*argv, "--load", str(tmp_path)], (1, NAN, 1000), "two", ranks=1)[0]
    assert (result["iteration"], result["verdict"].code) == (0, 17)


def test_without_save_there_is_no_second_opinion(pool):
    """Code 17 at once."""
    result = pool.run(train, _argv(CHECKS), (17, NAN, 1000), ranks=1)[0]
    assert result["verdict"].code == 17 and "without --save" in result["verdict"].cause


@pytest.mark.parametrize("flags", ["--rerun-mode disabled", CHECKS + " --no-check-for-nan-in-loss-and-grad"])
def test_where_nobody_looks_the_step_is_skipped(pool, flags):
    """A NaN costs its step, as ever."""
    result = pool.run(train, _argv(flags), (17, NAN), ranks=1)[0]
    assert result["iteration"] == 7 and "NAN" in result["losses"][4] and "NAN" not in result["losses"][5]


def test_an_overflow_of_fp16_is_no_fault(pool):
    """A dynamic loss scale finds its value by overflowing: neither computed again nor a reason to end."""
    argv = [word for word in _argv(CHECKS, "--fp16 --initial-loss-scale 4294967296") if word != "--bf16"]
    result = pool.run(train, argv, ranks=1)[0]
    assert result["iteration"] == 7 and not any("WARNING" in line for line in result["lines"])
    assert any("number of skipped iterations:   1" in line for line in result["lines"])


def test_a_gradient_that_is_not_finite_is_a_bad_result(pool, tmp_path):
    """The loss is finite, its gradient is not: seen by its norm, which has left the state alone."""
    argv = _argv(CHECKS, f"--save {tmp_path} --save-interval 100")
    result = pool.run(_train_with_bad_gradients, argv, ranks=1)[0]
    assert (result["iteration"], result["verdict"].code) == (4, 16)
    assert "iteration 5: grad norm is inf, twice on the same GPU" in result["verdict"].cause


def _train_with_bad_gradients(argv):
    from unittest import mock

    from megatron.training import rerun

    compute, calls = rerun.compute_gradients, []

    def broken(forward, data, chunks, optimizer, batches):
        gradients = compute(forward, data, chunks, optimizer, batches)
        calls.append(1)
        if len(calls) >= 5:
            next(chunks[0].parameters()).main_grad.view(-1)[3] = math.inf
        return gradients

    with mock.patch.object(rerun, "compute_gradients", broken):
        return train(argv)


def _program(argv: list[str], bad: str, host: str, launcher: list[str]) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, runpy; from megatron.training import rerun, train_step; from tests.checkpoint import rerun_cases\n"
        f"train_step.sum_losses = rerun_cases.BadLoss({bad}); rerun.place_of = lambda device: ({host!r}, 'GPU 0')\n"
        "sys.argv[0] = 'pretrain_gpt.py'; runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
    )
    program = Path(argv[0])
    program.write_text(code)
    return subprocess.run(
        [sys.executable, *launcher, str(program), *argv[1:]],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_program_ends_with_16_and_17(tmp_path):
    """Codes of the process, status, and the directory of the post-mortem; under torchrun the status keeps the code."""
    save = tmp_path / "save"
    argv = [str(tmp_path / "p.py"), *_argv(CHECKS, f"--save {save} --save-interval 100 --load {save}", steps=4)]
    nan = "%d, float('nan'), 1000"
    done = _program(argv, nan % 9, "one", [])
    assert done.returncode == 16, done.stderr[-2000:]
    (folder,) = save.glob("postmortem_*_nonfinite_iteration3")
    report = (folder / "report.txt").read_text()
    assert "cause: iteration 3: lm loss is nan, twice on the same GPU: resume on other GPUs" in report
    assert "samples: 8 to 11 of the training order" in report and "first bad parameter: " in report
    assert "training stops after iteration 2: iteration 3: lm loss is nan" in done.stdout
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = _program(argv, nan % 1, "one", launcher)
    assert done.returncode == 1 and json.loads((save / "status").read_text())["code"] == 16
    done = _program(argv, nan % 1, "two", [])
    assert done.returncode == 17, done.stderr[-2000:]
    assert read_status(save)["code"] == 17
