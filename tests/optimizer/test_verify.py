"""Checks in a running job: silent where both sides agree, and a single wrong bit ends the run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from loop_cases import GPT_LIKE, LLAMA_LIKE, train

from deep_offload.config import OffloadConfig
from deep_offload.optimizer import verify
from deep_offload.optimizer.verify import UpdateMismatch
from deep_offload.runtime.worker import SubgroupWorker


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ("--bf16 --grad-reduce-in-bf16 --offload-resident-fraction 0 --offload-gpu-share 0", LLAMA_LIKE),
        ("--bf16 --offload-resident-fraction 0.3 --offload-gpu-share 0.5", GPT_LIKE),
        ("--bf16 --offload-resident-fraction 0 --offload-gpu-share 1 --offload-split-master off", GPT_LIKE),
        ("--fp16 --initial-loss-scale 1024 --offload-resident-fraction 0 --offload-gpu-share 0.5", LLAMA_LIKE),
        ("--offload-resident-fraction 0 --offload-gpu-share 0.5", GPT_LIKE),
    ],
    ids=["cpu", "mixed", "gpu", "fp16", "fp32"],
)
def test_checks_pass_and_change_nothing(settings, model):
    """Every other step another subgroup is checked, and losses and digest are those without checks."""
    seen = []
    plain = train(f"{settings} --train-iters 8", model=model)
    checked = train(
        f"{settings} --train-iters 8 --offload-verify-interval 2",
        model=model,
        before_step=lambda optimizer: seen.append(optimizer._check.num_checks),
    )
    assert checked.losses == plain.losses and checked.digest == plain.digest
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("side", ["update_cpu", "update_gpu"])
@pytest.mark.parametrize(("what", "at"), [("exp_avg_sq", 7), ("exp_avg_sq", 1207), ("parameter", 1207)])
def test_one_wrong_bit_ends_the_run(monkeypatch, side, what, at):
    """The lowest bit of one element, made wrong by either side, is named with the subgroup and both values."""
    monkeypatch.setattr(verify, "_PIECE_NUMEL", 500)
    original = getattr(SubgroupWorker, side)

    def wrong(self, op):
        done = original(self, op)
        if what == "exp_avg_sq":
            arrays = self._host[op.subgroup] if side == "update_cpu" else self._staged(op)
            arrays["exp_avg_sq"].view(torch.int32)[at] ^= 1
        elif side == "update_cpu":
            self._weight_out(op.subgroup).view(torch.int16)[at] ^= 1
        else:
            self._buffers.weights[op.subgroup].view(torch.int16)[at] ^= 1
        return done

    monkeypatch.setattr(SubgroupWorker, side, wrong)
    share = 0 if side == "update_cpu" else 1
    settings = f"--bf16 --offload-resident-fraction 0 --offload-gpu-share {share} --offload-split-master off"
    message = rf"{what} of subgroup 0 differs .* in 1 of .* after step 3, first at {at} "
    with pytest.raises(UpdateMismatch, match=message):
        train(f"{settings} --train-iters 8 --offload-verify-interval 3")


def test_negative_interval_is_refused():
    """A negative interval gets one sentence."""
    with pytest.raises(ValueError, match="--offload-verify-interval is -1, allowed are 0"):
        OffloadConfig(offload_verify_interval=-1)
