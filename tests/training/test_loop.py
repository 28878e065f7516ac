"""Whole runs of tiny models in this process: what they print, what they train, what they skip."""

from __future__ import annotations

import math
import os
import re
import signal

import pytest
import torch

from megatron.training import train_step
from megatron.training.training import pretrain
from tests.training.corpora import counting_corpus
from tests.training.runs import LLAMA, SINGLE, digest, log_lines, run, settings

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron-core's words on packages that are not installed
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of 60 countable documents."""
    prefix = counting_corpus(tmp_path_factory.mktemp("data") / "text", 60, 80)
    return f"--data-path {prefix} --split 50,10,0"


@pytest.fixture(scope="module")
def plain(data):
    """Ten steps of a Llama-style model, with evaluations before, between and after them."""
    words = f"{LLAMA} --train-iters 10 --eval-iters 2 --eval-interval 5 --eval-at-start --lr-warmup-iters 2"
    return run(words, data)


def test_loss_falls(plain):
    """The model learns: training and validation loss fall by more than one nat."""
    losses = [float(line["loss"]) for line in log_lines(plain)]
    assert losses[0] == pytest.approx(math.log(101), abs=0.3)
    assert losses[-1] < losses[0] - 1
    valid = [float(value) for value in re.findall(r"lm loss value: (\S+)", plain)]
    assert valid[-1] < valid[0] - 1


def test_every_step_has_its_line(plain):
    """Ten steps print ten lines with the samples they consumed and, after each update, the next learning rate."""
    lines = log_lines(plain)
    assert [int(line["iteration"]) for line in lines] == list(range(1, 11))
    assert [int(line["samples"]) for line in lines] == list(range(4, 41, 4))
    assert [float(line["lr"]) for line in lines] == pytest.approx([5e-3] + [1e-2 * k / 8 for k in range(8, -1, -1)])
    assert "offload wait (ms): " in lines[0]["extra"]


def test_validation_is_framed(plain):
    """Evaluations stand before the first step, at their interval, and at the end, in Megatron's words."""
    found = re.findall(r"^-+\n validation loss at (.*?) \| lm loss value.*\n-+$", plain, re.MULTILINE)
    assert found == ["iteration 0", "iteration 5", "iteration 10", "iteration 10 on validation set"]


def test_start_and_end_are_told(plain):
    """The output names the device, every argument, the placement, the data and what was moved."""
    for text in (
        "> training on the CPU",
        "- arguments -",
        "  micro_batch_size ....",
        "> building train, validation, and test datasets ...",
        "training: 4,000 tokens in 50 documents, 40 samples of 32",
        "[after megatron is initialized] datetime: ",
        "[after model, optimizer, and learning rate scheduler are built] datetime: ",
        "[after dataloaders are built] datetime: ",
        "[after training is done] datetime: ",
        "> moved by lane gpu: ",
    ):
        assert text in plain
    digest(plain)


def test_evaluation_changes_nothing(plain, data):
    """Without a single evaluation the same training ends in the same bits."""
    assert digest(run(f"{LLAMA} --train-iters 10 --lr-warmup-iters 2", data)) == digest(plain)


def test_another_seed_gives_other_bits(plain, data):
    """The comparison above can fail: a different seed ends in different bits."""
    assert digest(run(f"{LLAMA} --train-iters 10 --lr-warmup-iters 2 --seed 7", data)) != digest(plain)


def test_offload_changes_nothing(plain, data):
    """With nothing resident, half updated on each side, and gradients flushed in backward, the bits are the same."""
    words = "--interleaved-offload --offload-resident-fraction 0 --offload-gpu-share 0.5 --offload-subgroup-numel 3000"
    output = run(f"{LLAMA} --train-iters 10 --lr-warmup-iters 2 {words}", data)
    assert digest(output) == digest(plain)
    moved = dict(re.findall(r"^> moved by lane (\w+): .*?\(?(\d+) (?:bytes|params)\)?$", output, re.MULTILINE))
    assert int(moved["h2d"]) > 0 and int(moved["d2h"]) > 0


def test_data_workers_change_nothing(plain, data):
    """Two loader processes give the same samples in the same order."""
    assert digest(run(f"{LLAMA} --train-iters 10 --lr-warmup-iters 2 --num-workers 2", data)) == digest(plain)


@pytest.fixture(scope="module")
def expected(data):
    """Losses of six plain fp32 steps."""
    return losses("", data)


def losses(words, data):
    """Return the losses of six fp32 steps with more words on the command line."""
    return [float(line["loss"]) for line in log_lines(run(f"{LLAMA} --train-iters 6 {words}", data))]


@pytest.mark.parametrize(
    "words",
    [
        "--micro-batch-size 4",
        "--micro-batch-size 1 --calculate-per-token-loss",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
    ],
)
def test_cutting_the_work_changes_nothing_but_rounding(words, data, expected):
    """Larger and smaller micro-batches and recomputation give the same losses within fp32 rounding."""
    assert losses(words, data) == pytest.approx(expected, rel=2e-5)


def test_dropout_is_the_same_when_recomputed(data, expected):
    """Recomputed layers drop the same elements."""
    words = "--attention-dropout 0.1 --hidden-dropout 0.1"
    full = f"{words} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    with_dropout = losses(words, data)
    assert with_dropout == losses(full, data)
    assert with_dropout != expected


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024", "--fp16 --loss-scale 128"])
def test_precisions_learn(precision, data, expected):
    """bf16 and fp16 with both kinds of loss scale follow the fp32 losses."""
    output = run(f"{LLAMA} --train-iters 6 {precision}", data)
    lines = log_lines(output)
    assert [float(line["loss"]) for line in lines] == pytest.approx(expected, rel=2e-2)
    scale = {"--bf16": 1.0, "--fp16 --initial-loss-scale 1024": 1024.0}.get(precision, 128.0)
    assert float(lines[0]["scale"]) == scale


def test_megatrons_default_model_trains(data):
    """LayerNorm, learned positions, GELU, biases, tied embeddings: the defaults train too."""
    lines = log_lines(run("--train-iters 8 --log-throughput --log-num-zeros-in-grad --log-params-norm", data))
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.5
    assert float(lines[0]["params"]) > 0 and lines[0]["tflops"] is not None and lines[0]["zeros"] is not None


def break_loss(monkeypatch, step, value):
    """Let the loss of all micro-batches of one step (counted from 1) be multiplied by `value`."""
    original = train_step.sum_losses
    calls = {"number": 0}

    def broken(mask, losses):
        total, tokens, report = original(mask, losses)
        if torch.is_grad_enabled():
            calls["number"] += 1
            if (calls["number"] + 1) // 2 == step:  # two micro-batches a step
                spoiled = {name: torch.stack([entry[0] * value, entry[1]]) for name, entry in report.items()}
                return total * value, tokens, spoiled
        return total, tokens, report

    monkeypatch.setattr(train_step, "sum_losses", broken)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_is_skipped_and_counted(monkeypatch, data, value):
    """A NaN or inf loss skips the update, shows in the line, is counted, and does not advance the learning rate."""
    break_loss(monkeypatch, 3, value)
    lines = log_lines(run(f"{LLAMA} --train-iters 5 --lr-warmup-iters 4", data))
    assert [int(line["skipped"]) for line in lines] == [0, 0, 1, 0, 0]
    assert lines[2]["loss"] == ("NAN" if math.isnan(value) else "INF")
    assert lines[2]["lr"] == lines[1]["lr"]
    assert math.isfinite(float(lines[4]["loss"]))


def test_a_skipped_step_leaves_state_untouched(monkeypatch, data):
    """Training whose last step is bad ends in the state before that step, bit for bit."""
    words = f"{LLAMA} --lr-decay-style constant"
    short = digest(run(f"{words} --train-iters 3", data))
    break_loss(monkeypatch, 4, math.nan)
    assert digest(run(f"{words} --train-iters 4", data)) == short


def test_fully_masked_batch_is_a_step_of_loss_0(monkeypatch, data):
    """When every token is masked the loss is 0, not NaN, and nothing is skipped."""
    original = train_step.sum_losses
    monkeypatch.setattr(train_step, "sum_losses", lambda mask, losses: original(torch.zeros_like(mask), losses))
    line = log_lines(run(f"{LLAMA} --train-iters 1", data))[0]
    assert (float(line["loss"]), int(line["skipped"]), float(line["norm"])) == (0.0, 0, 0.0)


def test_growing_batch(data):
    """The batch grows in steps over the given samples and the log shows each size."""
    words = f"{LLAMA} --train-iters 8 --global-batch-size 8 --rampup-batch-size 2 2 16"
    lines = log_lines(run(words, data))
    sizes = [int(line["batch"]) for line in lines]
    assert sizes == sorted(sizes) and sizes[0] == 2 and sizes[-1] == 8
    assert int(lines[-1]["samples"]) == sum(sizes)


def test_interval_and_stop(data):
    """Lines appear at their interval and after step 1; --exit-interval ends the run and says why."""
    output = run(f"{LLAMA} --train-iters 20 --log-interval 3 --exit-interval 7", data)
    assert [int(line["iteration"]) for line in log_lines(output)] == [1, 3, 6]
    assert "training stops after iteration 7: iteration 7 is a multiple of --exit-interval 7" in output


def test_signal_ends_the_run_after_the_iteration(monkeypatch, data):
    """With --exit-signal-handler the signal finishes the iteration, ends the run, and leaves the old handler behind."""
    before = signal.getsignal(signal.SIGUSR1)
    original = train_step.sum_losses

    def send(mask, losses):
        if torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(mask, losses)

    monkeypatch.setattr(train_step, "sum_losses", send)
    output = run(f"{LLAMA} --train-iters 9 --exit-signal-handler --exit-signal SIGUSR1", data)
    assert len(log_lines(output)) == 1
    assert "training stops after iteration 1: SIGUSR1 was received" in output
    assert signal.getsignal(signal.SIGUSR1) == before


def test_skipped_iterations_are_read(data):
    """--iterations-to-skip reads the samples of a step and throws them away."""
    output = run(f"{LLAMA} --train-iters 4 --iterations-to-skip 2", data)
    assert [int(line["iteration"]) for line in log_lines(output)] == [1, 3, 4]
    assert int(log_lines(output)[-1]["samples"]) == 16


def test_scalars_have_megatrons_names(tmp_path, data):
    """TensorBoard gets each scalar under Megatron's name, again against samples, and the validation loss."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(f"{LLAMA} --train-iters 4 --eval-iters 1 --eval-interval 2 --tensorboard-dir {tmp_path} --log-throughput", data)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    for name in ("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "iteration-time", "throughput"):
        assert {name, f"{name} vs samples"} <= tags
    assert [event.step for event in events.Scalars("lm loss validation")] == [2, 4, 4]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [4, 8, 12, 16]


def test_a_fault_in_the_loop_leaves_the_process_clean(monkeypatch, tmp_path, data):
    """An exception in a step comes out as it is, and the next run in the same process works."""
    monkeypatch.chdir(tmp_path)  # the post-mortem goes there

    def fail(*args):
        raise RuntimeError("this step is broken")

    monkeypatch.setattr("megatron.training.trainer.train_step", fail)
    with pytest.raises(RuntimeError, match="this step is broken"):
        pretrain(settings("--train-iters 2", data), SINGLE)
    assert list(tmp_path.glob("postmortem_*_error_rank0"))
    monkeypatch.undo()
    assert len(log_lines(run("--train-iters 2", data))) == 2
