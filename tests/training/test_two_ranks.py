"""Two ranks on gloo: every way to share the work trains the same model."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.corpora import counting_corpus
from tests.training.runs import LLAMA, digest, log_lines, run

ROOT = Path(__file__).resolve().parents[2]
COMMON = f"{LLAMA} --train-iters 5 --eval-iters 1 --eval-interval 5 --num-layers 4 --padded-vocab-size 128"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
OFFLOAD = "--interleaved-offload --offload-resident-fraction 0 --offload-gpu-share 0.5"
LAYOUTS = {
    "data": "",
    "data, offloaded": OFFLOAD,
    "overlapped": OVERLAP,
    "overlapped, offloaded": f"{OVERLAP} {OFFLOAD}",
    "tensor": "--tensor-model-parallel-size 2",
    "sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2",
    "virtual": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}
pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


def free_ports(count):
    """Return the first of `count` ports in a row that are free now."""
    for start in range(21000, 30000, count):
        try:
            for port in range(start, start + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return start
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of 60 countable documents."""
    prefix = counting_corpus(tmp_path_factory.mktemp("data") / "text", 60, 80)
    return f"--data-path {prefix} --split 50,10,0"


@pytest.fixture(scope="module")
def outputs(data):
    """What both ranks printed, by layout."""
    words = [f"{COMMON} {data} {layout}" for layout in LAYOUTS.values()]
    port = free_ports(len(words))
    command = [sys.executable, "-m", "tests.training.rank_runs"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port), *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=360) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts[0][1] + texts[1][1]
    by_rank = [json.loads(text[0].splitlines()[-1]) for text in texts]
    return {name: (by_rank[0][i], by_rank[1][i]) for i, name in enumerate(LAYOUTS)}


@pytest.fixture(scope="module")
def single(data):
    """The same run in one process."""
    return run(COMMON, data)


def losses(output):
    """Return the training losses and the last validation loss of an output."""
    valid = re.findall(r"lm loss value: (\S+)", output)
    return [float(line["loss"]) for line in log_lines(output)] + [float(valid[-1])]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("pipeline", "virtual")])
def test_same_losses_as_one_process(layout, outputs, single):
    """Data, tensor and sequence parallelism give the losses of one process within fp32 rounding."""
    assert losses(outputs[layout][1]) == pytest.approx(losses(single), rel=2e-5)


@pytest.mark.parametrize("layout", ["pipeline", "virtual"])
def test_pipelines_learn(layout, outputs, single):
    """Pipelines start from other weights (each stage has its own seed) and learn as fast."""
    assert losses(outputs[layout][1])[-1] == pytest.approx(losses(single)[-1], rel=0.1)


@pytest.mark.parametrize("layout", ["data", "overlapped"])
def test_offload_changes_no_bit(layout, outputs):
    """With the same buckets the digest is the same whether state is resident or offloaded."""
    assert digest(outputs[layout][0]) == digest(outputs[f"{layout}, offloaded"][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_rank_tells_and_last_rank_logs(layout, outputs):
    """Start, placement and digest come from the first rank, log lines and validation from the last."""
    first, last = outputs[layout]
    assert "> building train" in first and "> building train" not in last
    assert not log_lines(first) and len(log_lines(last)) == 5
    assert "validation loss" in last and "state digest" not in last
