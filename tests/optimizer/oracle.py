"""An Adam written apart from the project: one parameter at a time, plain torch, from the formulas of the documentation.

It shares no code with the engine. All scalars are Python floats rounded to fp32 by numpy; each arithmetic step is one
fp32 operation of torch.
"""

import numpy as np
import torch


def fp32(value: float) -> torch.Tensor:
    """A 0-dim fp32 tensor: torch may turn a division by a Python number into a multiplication."""
    return torch.tensor(np.float32(value))


def round_weight(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest; ties away from zero for bf16, to even for fp16."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.numpy().view(np.uint32)
    return torch.from_numpy(((bits + np.uint32(0x8000)) >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)


class OracleParam:
    """fp32 master and moments of one parameter, updated from clones of its final gradient."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.master = weight.detach().cpu().float().clone()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.step = 0

    def update(self, grad, *, lr, betas, eps, weight_decay, scale):
        """AdamW with decoupled decay; scale multiplies the gradient."""
        self.step += 1
        b1, b2 = betas
        g = grad.detach().cpu().float() * fp32(scale)
        self.exp_avg = self.exp_avg * fp32(b1) + g * fp32(1 - b1)
        self.exp_avg_sq = self.exp_avg_sq * fp32(b2) + (g * g) * fp32(1 - b2)
        root = torch.from_numpy(
            np.sqrt(self.exp_avg_sq.numpy())
        )  # torch's own root on the CPU is not correctly rounded
        denom = root / fp32((1 - b2**self.step) ** 0.5) + fp32(eps)
        decayed = self.master * fp32(1 - lr * weight_decay)
        self.master = decayed - (self.exp_avg / denom) * fp32(lr / (1 - b1**self.step))

    def weight(self) -> torch.Tensor:
        return round_weight(self.master, self.dtype)
