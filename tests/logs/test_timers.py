"""Timers, TensorBoard and Weights & Biases show what Megatron shows, under its names."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from megatron.training.timers import timer_lines
from tests.training.corpora import counting_corpus
from tests.training.runs import log_lines, run

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
TIMES = {"forward-backward": [0.0101, 0.0202], "optimizer": [0.003, 0.0]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of 60 countable documents."""
    prefix = counting_corpus(tmp_path_factory.mktemp("data") / "text", 60, 80)
    return f"--data-path {prefix} --split 50,10,0"


def test_lines_are_megatrons():
    """Milliseconds stand behind 48 dotted columns; ranks that did not time a part do not count."""
    assert timer_lines(TIMES, "minmax") == [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (10.10, 20.20)",
        "    optimizer ......................................: (3.00, 3.00)",
    ]
    assert timer_lines(TIMES, "max")[:2] == [
        "max time across ranks (ms):",
        "    forward-backward ...............................: 20.20",
    ]
    assert timer_lines(TIMES, "all") == [
        "times across ranks (ms):",
        "  forward-backward:",
        "     rank  0: 10.10",
        "     rank  1: 20.20",
        "  optimizer:",
        "     rank  0: 3.00",
    ]
    assert timer_lines({}, "max") == []


@pytest.mark.parametrize(
    "level, names",
    [
        (0, set()),
        (1, {"forward-backward", "all-grads-sync", "optimizer"}),
        (2, {"forward-backward", "forward-compute", "backward-compute", "batch-generator", "optimizer"}),
    ],
)
def test_levels(data, level, names):
    """Each level prints its parts of the step after every log line, and what is inside a part takes no longer."""
    output = run(f"--train-iters 3 --timing-log-level {level} --timing-log-option max", data)
    shown = re.findall(r"^    ([\w-]+) \.+: (\d+\.\d\d)$", output, re.MULTILINE)
    assert names <= {name for name, _ in shown}
    assert output.count("max time across ranks (ms):") == (3 if level else 0)
    if level == 2:
        last = {name: float(value) for name, value in shown}
        assert last["forward-compute"] + last["backward-compute"] <= last["forward-backward"] + 0.1


def test_timing_changes_no_bit(data):
    """A timed run trains the same weights, and its evaluations are not timed."""
    words = "--train-iters 4 --eval-iters 2 --eval-interval 2 --log-interval 2"
    plain, timed = run(words, data), run(words + " --timing-log-level 2", data)
    assert [line["loss"] for line in log_lines(plain)] == [line["loss"] for line in log_lines(timed)]
    digests = [re.findall("sha256:[0-9a-f]+", output) for output in (plain, timed)]
    assert digests[0] == digests[1] != []


def scalars(folder):
    """Return {name: [steps]} of a TensorBoard folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_timers_are_drawn(data, tmp_path):
    """--log-timers-to-tensorboard draws `NAME-time` whenever a line is printed, and nothing without the flag."""
    words = f"--train-iters 4 --log-interval 2 --timing-log-level 1 --tensorboard-dir {tmp_path}"
    run(f"{words}/with --log-timers-to-tensorboard", data)
    drawn = scalars(tmp_path / "with")
    assert drawn["optimizer-time"] == drawn["forward-backward-time"] == [1, 2, 4]
    run(f"{words}/without", data)
    assert not [name for name in scalars(tmp_path / "without") if name.endswith("-time") and name != "iteration-time"]


class FakeWandb(ModuleType):
    """Stands for the package: keeps what is logged."""

    def __init__(self):
        super().__init__("wandb")
        self.settings, self.logged, self.is_finished = {}, [], False

    def init(self, **settings):
        self.settings = settings

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


def test_wandb_names(data, tmp_path, monkeypatch):
    """Weights & Biases gets Megatron's names without `vs samples`, the samples themselves, and every setting."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    words = (
        "--train-iters 4 --eval-iters 1 --eval-interval 4 --log-throughput --log-params-norm --log-num-zeros-in-grad"
    )
    run(f"{words} --wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path} --timing-log-level 1", data)
    names = {name for _, values in fake.logged for name in values}
    assert {
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "iteration-time",
        "throughput",
        "samples vs steps",
        "lm loss validation",
    } == names - {"host-used-bytes"}  # ours, not Megatron's
    assert [(step, values) for step, values in fake.logged if "samples vs steps" in values] == [
        (step, {"samples vs steps": 4 * step}) for step in range(1, 5)
    ]
    assert (fake.settings["project"], fake.settings["name"], fake.settings["dir"]) == ("p", "n", str(tmp_path))
    assert fake.settings["config"]["micro_batch_size"] == 2
    assert fake.is_finished
