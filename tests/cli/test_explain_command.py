"""`python -m deep_offload explain`: exit codes, arguments of the script, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 \\
    --micro-batch-size 1 --train-iters 5 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 $2 --bf16
"""


@pytest.mark.parametrize(
    ("more", "code", "last"),
    [([], 0, "no surprises"), (["-x", "--swiglu"], 0, "no surprises"), (["a", "--num-experts=8"], 2, "1 surprise")],
)
def test_explain(tmp_path, more, code, last):
    """Code 0 without surprises and 2 with them; words behind the script are its own arguments."""
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    command = [sys.executable, "-X", "importtime", "-m", "deep_offload", "explain", str(path), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr[-300:]
    assert done.stdout.splitlines()[-1] == last
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "megatron.training.explain" in imported and not imported & {"torch", "numpy", "megatron.core"}
