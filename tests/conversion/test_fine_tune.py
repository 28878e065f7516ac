"""pretrain_gpt.py --finetune --load CONVERTED --interleaved-offload trains, and the result exports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deep_offload.kernels.reference import round_to
from megatron.training.conversion.dist_checkpoint import LayerReader
from megatron.training.conversion.exporter import OurModel, export_checkpoint
from megatron.training.conversion.importer import open_model
from megatron.training.conversion.model_args import read_flags_script
from megatron.training.conversion.verify import verify_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def pretrain(ours, save, *words, ranks=1):
    """Run pretrain_gpt.py as a user would; returns what it printed."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*launch, str(ROOT / "pretrain_gpt.py"), *read_flags_script(ours)]
    command += ["--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "5"]
    command += ["--mock-data", "--log-interval", "1", "--eval-iters", "0", "--num-workers", "0", "--finetune"]
    command += ["--load", str(ours), "--save", str(save), "--save-interval", "5", "--interleaved-offload"]
    command += ["--offload-resident-fraction", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("neox", 1, ["--bf16"]),
        ("qwen2", 2, ["--bf16", "--pipeline-model-parallel-size", "2"]),
        pytest.param("qwen3", 4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
                     marks=pytest.mark.full),
        pytest.param("mistral", 2, ["--bf16", "--tensor-model-parallel-size", "2"], marks=pytest.mark.full),
        pytest.param("llama3", 1, ["--fp16", "--loss-scale", "1024"], marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_train_export_parity(converted, tmp_path, name, ranks, words):
    """After five steps, on one or several ranks, the export computes in transformers what the checkpoint does here."""
    model = converted(name)
    printed = pretrain(model.ours, tmp_path / "tuned", "--lr", "1e-2", *words, ranks=ranks)
    assert "loaded weights, the optimizer starts anew" in printed
    export_checkpoint(tmp_path / "tuned", tmp_path / "out")
    verified = verify_checkpoint(tmp_path / "out", tmp_path / "tuned", seq_length=96)
    assert verified.is_good
    changed = verify_checkpoint(model.hf, tmp_path / "tuned", seq_length=96)
    assert len(changed.different) == changed.num_tensors, "training changes every tensor"
    assert changed.parity.error > 0.1


def test_masters_are_the_sources_bits(converted, tmp_path):
    """An fp32 source fills the fp32 masters exactly, and bf16 weights are rounded from those."""
    model = converted("llama3", torch.float32)
    pretrain(model.ours, tmp_path / "tuned", "--bf16", "--lr", "0")
    source, reader = open_model(model.hf), LayerReader(OurModel(tmp_path / "tuned").folder)
    for rule in source.rules:
        wanted = source.pack(rule)
        master = reader.read(f"optimizer.state.param.{rule.key}", rule.layer, rule.shape[0])
        assert torch.equal(master, wanted)
        weight = reader.read(rule.key, rule.layer, rule.shape[0])
        assert torch.equal(weight, round_to(wanted, torch.bfloat16))
        assert not torch.equal(weight.float(), wanted)
