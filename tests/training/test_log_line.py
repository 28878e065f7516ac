"""The log line is Megatron's, byte for byte, with our fields behind it."""

from __future__ import annotations

import math
from datetime import datetime

from megatron.training.evaluation import evaluation_lines
from megatron.training.metrics import Interval, LogValues, log_line
from megatron.training.train_step import StepResult
from tests.training.runs import LINE

VALUES = dict(
    iteration=10,
    num_iterations=100,
    consumed_samples=640,
    seconds_per_iteration=1.2345,
    tflops_per_gpu=412.34,
    learning_rate=3e-4,
    decoupled_learning_rate=None,
    batch_size=64,
    loss_scale=1.0,
    grad_norm=1.2344,
    num_zeros=None,
    params_norm=None,
    extra=[("offload wait (ms)", "1.2")],
)
NOW = datetime(2026, 8, 22, 10, 11, 12)


def interval(*results):
    """Return an interval that has seen these steps."""
    seen = Interval()
    for result in results:
        seen.add(result)
    return seen


def step(loss, skipped=False):
    """Return what a step with this loss reports."""
    return StepResult({"lm loss": loss}, skipped, 1.2344, None)


def test_line_is_megatrons():
    """The whole line, including a time stamp without microseconds, equals the known text."""
    line = log_line(LogValues(**VALUES), interval(step(10.0), step(10.69134)), NOW)
    assert line == (
        " [2026-08-22 10:11:12.000000] iteration       10/     100 | consumed samples:          640 | elapsed time per "
        "iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 3.000000E-04 | global batch "
        "size:    64 | lm loss: 1.034567E+01 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 "
        "| number of nan iterations:   0 | offload wait (ms): 1.2 |"
    )
    assert LINE.match(line)


def test_optional_fields_stand_between():
    """Number of zeros and parameter norm stand where Megatron puts them, throughput goes with its flag."""
    values = LogValues(**{**VALUES, "tflops_per_gpu": None, "num_zeros": 7, "params_norm": 12.5})
    match = LINE.match(log_line(values, interval(step(1.0)), NOW))
    assert match is not None
    assert (match["tflops"], match["zeros"], match["params"]) == (None, "7", "12.500")


def test_skipped_steps_do_not_enter_the_mean():
    """The loss is the mean over updates; skipped and NaN steps are counted."""
    match = LINE.match(log_line(LogValues(**VALUES), interval(step(2.0), step(math.nan, True), step(4.0)), NOW))
    assert match is not None
    assert (float(match["loss"]), int(match["skipped"]), int(match["nan"])) == (3.0, 1, 1)


def test_nan_is_printed():
    """A NaN loss stays in the line, whether its step was skipped or not."""
    for skipped in (True, False):
        match = LINE.match(log_line(LogValues(**VALUES), interval(step(math.nan, skipped)), NOW))
        assert match is not None
        assert match["loss"] == "NAN"


def test_validation_frame():
    """Validation losses stand between two rules of dashes, one longer than the text."""
    frame, text, last = evaluation_lines("iteration 1000", {"lm loss": 2.345678})
    assert text == (" validation loss at iteration 1000 | lm loss value: 2.345678E+00 | lm loss PPL: 1.044035E+01 | ")
    assert frame == last == "-" * (len(text) + 1)
