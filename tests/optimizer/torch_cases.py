"""A small model and settings that cut it into several subgroups, for tests of `InterleavedAdamW`."""

import torch
from torch import nn

from deep_offload.config import OffloadConfig


def offload(**settings) -> OffloadConfig:
    base = dict(offload_gpu_share=0.5, offload_resident_fraction=0.0, offload_subgroup_numel=200, offload_cpu_threads=1)
    return OffloadConfig(interleaved_offload=True, **{**base, **settings})


def make_model(dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 7)).to(dtype)


def batch(step: int, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 24, generator=generator).to(dtype), torch.randint(0, 7, (16,), generator=generator)


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, y = batch(step, dtype)
    return nn.functional.cross_entropy(model(x).float() * scale, y)


def groups_of(model: nn.Module) -> list[dict]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0},
    ]
