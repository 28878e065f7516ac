"""InterleavedAdamW on a GPU: the oracle's bits, with gradients flushed in backward or not."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from oracle import OracleParam

from deep_offload.optimizer.torch import InterleavedAdamW
from tests.optimizer.torch_cases import groups_of, loss_of, make_model, offload

BETAS = (0.9, 0.95)


@pytest.mark.parametrize("flush_in_backward", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_oracle_bits_on_the_gpu(monkeypatch, share, flush_in_backward, dtype):
    """Groups, clipping and 20 steps: masters, moments and weights are the oracle's."""
    model = make_model(dtype).cuda()
    optimizer = InterleavedAdamW(
        groups_of(model),
        lr=1e-2,
        betas=BETAS,
        offload=offload(offload_gpu_share=share, offload_cpu_threads=4),
        max_grad_norm=0.3,
        flush_in_backward=flush_in_backward,
    )
    oracle = {p: OracleParam(p) for p in model.parameters()}
    monkeypatch.setattr("tests.optimizer.torch_cases.batch", _cuda_batch)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step, scale=4.0).backward()
        grads = {p: p.grad.clone() for p in model.parameters()}
        optimizer.step()
        clip = min(1.0, 0.3 / (optimizer.last_grad_norm + 1e-6))
        for group in optimizer.param_groups:
            for p in group["params"]:
                oracle[p].update(
                    grads[p],
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    scale=clip,
                )
    state = optimizer.state_dict()["state"]
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(ordered):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[index][name], getattr(oracle[p], name)), f"{name} of parameter {index}"
        assert torch.equal(p.detach().cpu(), oracle[p].weight())
    optimizer.close()


def _cuda_batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 24, generator=generator).to(dtype)
    return inputs.cuda(), torch.randint(0, 7, (16,), generator=generator).cuda()
