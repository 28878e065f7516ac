"""tools/checkpoint/inspect.py: verify, inspect and diff without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.training.checkpointing_inspect import Checkpoint, misfits, ordered_bits
from megatron.training.checkpointing_inspect_cli import main
from tests.checkpoint.cases import MODEL, OFFLOAD, train, words

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Checkpoints of iterations 2 and 4 of a run on two tensor-parallel ranks, and its digest at the end."""
    folder = tmp_path_factory.mktemp("inspect")
    flags = f"--save {folder} --save-interval 2 --exit-interval 4 --tensor-model-parallel-size 2"
    return folder, pool.run(train, words(MODEL, OFFLOAD, flags), ranks=2)[0]["digest"]


def test_the_digest_is_that_of_the_run(saved, capsys):
    """Read from files alone, tensor by tensor, it equals what the run on two ranks computed from its memory."""
    folder, digest = saved
    assert Checkpoint(folder / "iter_0000004").digest() == digest
    assert Checkpoint(folder / "iter_0000002").digest() != digest
    assert main(["verify", str(folder), "--digest"]) == 0
    out = capsys.readouterr().out
    assert "7 files match their checksums" in out and f"state digest: {digest}" in out


def test_a_damaged_checkpoint_fails(saved, tmp_path, capsys):
    """One flipped bit: code 1 and the file's name."""
    import shutil

    folder = tmp_path / "iter_0000002"
    shutil.copytree(saved[0] / "iter_0000002", folder)
    path = folder / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)
    assert main(["verify", str(folder)]) == 1
    assert "__1_0.distcp is damaged" in capsys.readouterr().err


def test_inspect_answers_where_it_loads(saved, capsys):
    """Sizes, layout, parameters by their names in the whole model, and an answer with a reason."""
    assert main(["inspect", str(saved[0]), "--norms", "--tp", "2", "--pp", "2", "--dp", "2"]) == 0
    out = capsys.readouterr().out
    assert "iteration 4, optimizer steps 4" in out and "saved at TP 2 x PP 1 x DP 1" in out
    assert "decoder.layers.3.mlp.linear_fc1.weight  exp_avg_sq  float32" in out and "norm " in out
    assert "loads at TP 2 x PP 2 x DP 2: yes" in out
    assert main(["inspect", str(saved[0]), "--tp", "3", "--pp", "3"]) == 1
    out = capsys.readouterr().out
    assert "no, 4 attention heads do not divide" in out and "4 layers do not divide" in out
    assert misfits({"global_batch_size": 4, "micro_batch_size": 1}, 1, 1, 3)


def test_diff_counts_in_units_in_the_last_place(saved, pool, tmp_path, capsys):
    """A checkpoint equals itself; one changed number is found with its distance."""
    folder, _ = saved
    assert main(["diff", str(folder), str(folder / "iter_0000004")]) == 0
    assert "the same bit by bit" in capsys.readouterr().out
    assert main(["diff", str(folder / "iter_0000002"), str(folder / "iter_0000004")]) == 1
    out = capsys.readouterr().out
    assert "optimizer steps: 2 and 4" in out and "decoder.layers.0.mlp.linear_fc2.weight  master:" in out


def test_ordered_bits_count_neighbors():
    """Distances are steps between neighboring numbers, across zero as well."""
    numbers = torch.tensor([-1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0])
    bits = ordered_bits(numbers).tolist()
    assert bits == sorted(bits) and [b - a for a, b in zip(bits[1:4], bits[2:5])] == [1, 1, 1]
    one = torch.tensor([1.0])
    above = torch.nextafter(one, torch.tensor([2.0]))
    assert int(ordered_bits(above) - ordered_bits(one)) == 1
    assert ordered_bits(torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)).diff().item() == 1


def test_the_script_starts_beside_a_module_of_its_name(saved):
    """The file is called as a module of the standard library that torch imports: it must not shadow it."""
    script = [sys.executable, str(REPOSITORY / "tools" / "checkpoint" / "inspect.py"), "verify", str(saved[0])]
    done = subprocess.run(script, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0 and "complete" in done.stdout, done.stderr[-2000:]
    empty = subprocess.run([*script[:2], "verify", "/nowhere"], capture_output=True, text=True, cwd="/", timeout=120)
    assert empty.returncode == 1 and empty.stderr.count("\n") <= 2 and "holds no checkpoint" in empty.stderr
