"""Tiny runs for the tests of the training layer: settings, and `pretrain` with its output caught."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile

import torch

from megatron.training.arguments import build_config
from megatron.training.config import TrainingConfig
from megatron.training.launch import Ranks
from megatron.training.training import pretrain

SINGLE = Ranks(0, 1, 0, 1, "127.0.0.1", 0, "single")
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --log-interval 1 --eval-iters 0 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 "
    "--log-state-digest --use-cpu"
)
LLAMA = (
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)

LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration (?P<iteration>[ \d]{8})/(?P<total>[ \d]{8}) \| "
    r"consumed samples: (?P<samples>[ \d]{12}) \| elapsed time per iteration \(ms\): \d+\.\d \| "
    r"(throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>\d+\.\d) \| )?"
    r"learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \| global batch size: (?P<batch>[ \d]{5}) \| "
    r"lm loss: (?P<loss>(\d\.\d{6}E[+-]\d\d|NAN|INF)) \| loss scale: (?P<scale>\d+\.\d) \| "
    r"grad norm: (?P<norm>(\d+\.\d{3}|nan|inf)) \| "
    r"(num zeros: (?P<zeros>\d+) \| )?(params norm: (?P<params>\d+\.\d{3}) \| )?"
    r"number of skipped iterations: (?P<skipped>[ \d]{3}) \| number of nan iterations: (?P<nan>[ \d]{3}) \|"
    r"(?P<extra>.*)$"
)


def settings(words: str, data: str = "--mock-data", world_size: int = 1) -> TrainingConfig:
    """Return the settings of a tiny run with more words on its command line."""
    return build_config(f"{TINY} {data} {words}".split(), world_size=world_size)


def run(words: str, data: str = "--mock-data") -> str:
    """Train in this process, in a folder of its own, and return what was printed."""
    torch.set_num_threads(1)  # for models this small a second thread only costs time
    output, here = io.StringIO(), os.getcwd()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
            os.chdir(folder)  # a run with a planted NaN leaves its post-mortem there
            pretrain(settings(words, data), SINGLE)
    finally:
        os.chdir(here)
    return output.getvalue()


def log_lines(output: str) -> list[re.Match[str]]:
    """Return the log lines of an output; each must have Megatron's form."""
    lines = [line for line in output.splitlines() if "] iteration " in line]
    matches = [LINE.match(line) for line in lines]
    assert all(matches), lines
    return [match for match in matches if match is not None]


def digest(output: str) -> str:
    """Return the state digest that a run printed."""
    found = re.findall(r"^state digest: (sha256:[0-9a-f]{64})$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]
