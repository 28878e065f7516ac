"""The training loop on a GPU: one digest for every offload setting, in deterministic mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from loop_cases import GPT_LIKE, LLAMA_LIKE, train

SETTINGS = [
    "--offload-gpu-share 0 --offload-grad-wire fp32",
    "--offload-gpu-share 0.5 --offload-num-slots 1",
    "--offload-gpu-share 1",
]


@pytest.mark.parametrize(
    ("precision", "model"),
    [
        ("--bf16 --grad-reduce-in-bf16", LLAMA_LIKE),
        ("--bf16", GPT_LIKE),
        ("--fp16 --initial-loss-scale 1024", LLAMA_LIKE),
        ("", GPT_LIKE),
    ],
    ids=["bf16", "bf16-fp32-gradients", "fp16", "fp32"],
)
def test_one_digest_on_the_gpu(precision, model):
    """Losses and digest of every setting are those of the all-resident run."""
    common = f"{precision} --global-batch-size 4 --train-iters 8"
    model = model.replace("48", "64")
    want = train(f"{common} --offload-resident-fraction 1", model=model)
    for setting in SETTINGS:
        got = train(f"{common} --offload-resident-fraction 0 {setting}", model=model)
        assert got.losses == want.losses, setting
        assert got.digest == want.digest, setting


def test_checks_of_both_sides_on_the_gpu():
    """Real CPU and GPU kernels agree on every subgroup that --offload-verify-interval picks, and change nothing."""
    common = "--bf16 --offload-resident-fraction 0.2 --offload-gpu-share 0.5 --train-iters 8"
    want = train(common, model=LLAMA_LIKE.replace("48", "64"))
    assert train(f"{common} --offload-verify-interval 1", model=LLAMA_LIKE.replace("48", "64")).digest == want.digest
