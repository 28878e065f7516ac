"""The launch scripts train: their flags unchanged but for sizes, paths and lengths, plus interleaved offload."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from megatron.training.arguments import build_config
from megatron.training.training import pretrain
from tests.training.corpora import counting_corpus
from tests.training.runs import SINGLE, digest, log_lines
from tests.training.test_launch_scripts import ALL, flags_of

# Appended to every script: the last of repeated flags counts.
SMALL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--transformer-impl local --tokenizer-type NullTokenizer --vocab-size 200 --log-interval 1 --eval-interval 50 "
    "--eval-iters 1 --num-workers 0 --use-cpu --interleaved-offload --log-state-digest --initial-loss-scale 1024"
)

# Flags whose words are replaced where a script has them: sizes, lengths and paths.
RESIZED = {
    "--kv-channels": "16",
    "--num-query-groups": "2",
    "--window-size": "7,0",
    "--padded-vocab-size": "256",
    "--global-batch-size": "8",
    "--rampup-batch-size": "4 4 8",
    "--step-batch-size-schedule": "0:4 256:8",
    "--train-iters": "4",
    "--train-samples": "24",
    "--lr-decay-iters": "4",
    "--lr-decay-samples": "24",
    "--lr-warmup-iters": "1",
    "--lr-warmup-samples": "4",
    "--lr-wsd-decay-iters": "2",
    "--data-path": "1 {data}",
    "--train-data-path": "{data}",
    "--valid-data-path": "{data}",
    "--data-args-path": "{blend}",
    "--data-cache-path": "{out}/cache",
    "--vocab-file": "{out}/vocab.json",
    "--merge-file": "{out}/merges.txt",
    "--tensorboard-dir": "{out}/tb",
    "--split": "80,20,0",
}

# Left out: one process has no pipeline; what is loaded and logged elsewhere is not there.
LEFT_OUT = (
    "--num-layers-per-virtual-pipeline-stage",
    "--tokenizer-model",
    "--save",
    "--load",
    "--exit-on-missing-checkpoint",
    "--wandb-project",
    "--wandb-exp-name",
)


def resized(name: str, places: dict[str, str]) -> list[str]:
    """Return the script's flags with small sizes."""
    argv: list[str] = []
    keep = True
    for word in flags_of(name):
        if word.startswith("--"):
            keep = word not in RESIZED and word not in LEFT_OUT
            if word in RESIZED:
                argv += [word, *RESIZED[word].format(**places).split(" ")]
        if keep:
            argv.append(word)
    return argv + SMALL.split()


@pytest.fixture
def places(tmp_path):
    data = counting_corpus(tmp_path / "data", 60, 40, 200)
    blend = tmp_path / "blend.txt"
    blend.write_text(f"1 {data}\n")
    return {"data": data, "blend": str(blend), "out": str(tmp_path)}


@pytest.fixture(autouse=True)
def no_deterministic_mode_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ALL)
def test_script_trains(name, places):
    """A few steps run, the loss is printed in Megatron's form, and what does not apply is listed."""
    config = build_config(resized(name, places))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        pretrain(config, SINGLE)
    lines = log_lines(output.getvalue())
    assert len(lines) == config.num_iterations >= 3
    assert all(4.0 < float(line["loss"]) < 7.0 for line in lines)
    digest(output.getvalue())
    for number, note in enumerate(config.notes, start=1):
        assert f"  {number}. {note}" in output.getvalue()
