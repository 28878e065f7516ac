"""The training loop on a GPU: one digest for every offload setting, in deterministic mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from loop_cases import GPT_LIKE, LLAMA_LIKE, train

SETTINGS = [
    "--offload-gpu-share 0 --offload-grad-wire fp32",
    "--offload-gpu-share 0.5",
    "--offload-gpu-share 1 --offload-split-master off",
    "--offload-stride 3 --offload-num-slots 1",
    "--offload-gpu-share 0.5 --offload-resident-fraction 0.5",
]


@pytest.mark.parametrize(
    "precision", ["--bf16 --grad-reduce-in-bf16", "--bf16", "--fp16 --initial-loss-scale 1024", ""]
)
@pytest.mark.parametrize("model", [LLAMA_LIKE, GPT_LIKE], ids=["llama", "gpt"])
def test_one_digest_on_the_gpu(precision, model):
    """Losses and digest of every setting are those of the all-resident run."""
    model = model.replace("48", "64")
    want = train(f"{precision} --offload-resident-fraction 1 --global-batch-size 4", model=model)
    for setting in SETTINGS:
        if precision != "--bf16 --grad-reduce-in-bf16" or "split" in setting:
            setting = setting.replace("--offload-split-master off", "")
        got = train(f"{precision} --offload-resident-fraction 0 --global-batch-size 4 {setting}", model=model)
        assert got.losses == want.losses, setting
        assert got.digest == want.digest, setting
