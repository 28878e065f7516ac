"""Errors about offload on the real command line: one sentence, the right exit code, before anything large."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-3 --bf16 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 1000 --eval-iters 0 --use-cpu"
).split()

CASES = {
    "host budget": (
        "--interleaved-offload --offload-resident-fraction 0 --offload-host-budget-gib 0.0005",
        r"optimizer state needs .* of host memory, but this rank has .*--offload-host-budget-gib",
    ),
    "device budget": (
        "--interleaved-offload --offload-resident-fraction 1 --offload-device-budget-gib 0.0005",
        "exceed the device budget",
    ),
    "slot budget": (
        "--interleaved-offload --offload-gpu-share 1 --offload-resident-fraction 0 --offload-subgroup-numel 50000 "
        "--offload-device-budget-gib 0.0005",
        "staging slots for subgroups of .* lower --offload-subgroup-numel or",
    ),
    "unknown flag": ("--interleaved-offlod", "--interleaved-offload"),
    "contradiction": (
        "--interleaved-offload --offload-stride 2 --offload-gpu-share 0.5",
        "--offload-stride 2 and --offload-gpu-share 0.5 both choose",
    ),
    "wire": ("--interleaved-offload --offload-grad-wire param", "--offload-grad-wire param would round gradients"),
    "share": ("--interleaved-offload --offload-gpu-share 1.5", "--offload-gpu-share"),
    "profile": ("--interleaved-offload --offload-profile /nowhere/x.json", "/nowhere/x.json cannot be read"),
}


def run(folder, arguments, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", CASES)
def test_usage_error(name, tmp_path):
    """Each wrong setting ends with code 2 and one sentence on stderr that names the flag."""
    import re

    arguments, sentence = CASES[name]
    result = run(tmp_path, [*BASE, *arguments.split()], DEEP_OFFLOAD_CACHE=str(tmp_path.parent / "cache"))
    assert result.returncode == 2, result.stderr
    last = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py: error:")]
    assert len(last) == 1
    assert re.search(sentence, last[0]), last[0]
    assert "Traceback" not in result.stderr


def test_forced_isa_that_is_unknown(tmp_path):
    """DEEP_OFFLOAD_ISA with an unknown name stops the start and lists those supported."""
    result = run(
        tmp_path,
        [*BASE, *"--interleaved-offload --offload-resident-fraction 0 --offload-gpu-share 0".split()],
        DEEP_OFFLOAD_ISA="sse9",
        DEEP_OFFLOAD_CACHE=str(tmp_path),
    )
    assert result.returncode == 2, result.stderr[-2000:]
    assert "sse9" in result.stderr
    assert "scalar" in result.stderr


def test_extension_not_built(tmp_path):
    """Without the compiled module the start stops with the command that builds it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'deep_offload._C':\n"
        "            raise ModuleNotFoundError(\"No module named 'deep_offload._C'\")\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    flags = "--interleaved-offload --offload-resident-fraction 0"
    result = run(tmp_path, [*BASE, *flags.split()], PYTHONPATH=str(tmp_path))
    assert result.returncode in (1, 2), result.stdout[-500:]
    assert "deep_offload._C cannot be imported" in result.stderr
    assert "pip install -e ." in result.stderr


def test_dry_run_allocates_nothing_and_says_whether_it_fits(tmp_path):
    """--dry-run prints plan, bytes and times; exit 0, or 2 where it does not fit; torch is never imported."""
    model = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 "
        "--micro-batch-size 1 --train-iters 5 --lr 1e-3 --bf16 --grad-reduce-in-bf16 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 32000 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --interleaved-offload --dry-run --offload-profile h200"
    ).split()
    code = (
        "import runpy, sys\n"
        "sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
        "try:\n"
        "    runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    print('torch' in sys.modules, stop.code)\n"
    )
    fits = subprocess.run([sys.executable, "-c", code, *model], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert fits.stdout.splitlines()[-1] == "False 0", fits.stderr
    assert "predicted update" in fits.stdout
    assert "host bytes of a rank" in fits.stdout
    small = run(tmp_path, [*model, "--offload-resident-fraction", "0", "--offload-host-budget-gib", "20"])
    assert small.returncode == 2
    assert "does not fit: optimizer state needs" in small.stdout
