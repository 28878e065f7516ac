"""GPU memory that really runs out, in the model's own compute: what the run leaves, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.training.checkpointing_status import read_status

REPOSITORY = Path(__file__).resolve().parents[2]

# State and start-up fit into the cap with room to spare; the activations of one micro-batch are several times as large.
CAP_GIB = 6
MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 64 --global-batch-size 64 --train-iters 4 --lr 1e-4 --bf16 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 8191 --log-interval 1 --eval-iters 0 --num-workers 0"
)
OFFLOAD = "--interleaved-offload --offload-resident-fraction 0.5 --offload-gpu-share 0.5"


def test_gpu_memory_that_runs_out_is_described(tmp_path):
    """Code 1, `failed` in the status, and a directory with the cause, GPU memory and the flag of the budget."""
    save = tmp_path / "save"
    code = (
        "import runpy, sys, torch\n"
        "total = torch.cuda.get_device_properties(0).total_memory\n"
        f"torch.cuda.set_per_process_memory_fraction({CAP_GIB} * 2**30 / total, 0)\n"
        "sys.argv[0] = 'pretrain_gpt.py'; runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    argv = f"{MODEL} {OFFLOAD} --save {save} --save-interval 100".split()
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    tail = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 1, tail
    assert "before the start of training step" in done.stdout, f"it ran out before the model computed:\n{tail}"
    assert "OutOfMemoryError" in done.stderr, tail
    advice = "optimizer state and staging slots: lower --offload-device-budget-gib (or --offload-resident-fraction"
    assert advice in done.stderr, tail
    (folder,) = save.glob("postmortem_*_error_rank0")
    assert f"ERROR: rank 0: what was known is in {folder}" in done.stderr
    report = (folder / "report.txt").read_text()
    assert "cause: out of GPU memory in iteration 1: CUDA out of memory" in report
    assert advice in report and "GPU memory: " in report and "planned optimizer state: " in report
    status = read_status(save)
    assert (status["status"], status["code"], status["iteration"]) == ("failed", 1, 0)
    assert status["cause"].startswith("OutOfMemoryError: CUDA out of memory")
    assert not list(save.glob("killed_*")), "the watcher took a failure for a kill"
