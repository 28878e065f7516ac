"""Masters that change their form piece by piece, so that temporary tensors on the device are small."""

from __future__ import annotations

import torch

from deep_offload.kernels import reference

PIECE_NUMEL = 1 << 22
"""Elements that are converted at once: temporary tensors on the device take some 64 MiB."""


def pieces(numel: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive pieces of at most `size` elements."""
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def widen_into(master: torch.Tensor, weight: torch.Tensor) -> None:
    """fp32 masters [numel] of weights [numel], converted where the weights are."""
    for start, end in pieces(weight.numel(), PIECE_NUMEL):
        master[start:end].copy_(weight[start:end].float())


def split_into(low: torch.Tensor, master: torch.Tensor, device: torch.device) -> None:
    """The int16 low halves of an fp32 master [numel], converted on `device`.

    low: [numel] or more, and may be the start of the master's own bytes: halves never reach what is still to be read.
    """
    for start, end in pieces(master.numel(), PIECE_NUMEL):
        low[start:end].copy_(reference.split_master(master[start:end].to(device))[1])
