"""The global gradient norm, the same number whatever the placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Run = tuple[int, int, int]
"""(shard, start, end) of elements that count towards the norm."""


def counted_runs(segments: Sequence[Sequence[tuple[int, int, bool]]]) -> list[Run]:
    """Merge neighbors: per shard a list of (start, end, is counted), sorted, in; longest runs of counted elements out.

    What is not counted (copies on other tensor-parallel ranks, tied copies) splits a run; padding, which is zero, does
    not. The order of summation thus depends on parameters and their place in the gradient buffers alone.
    """
    runs: list[Run] = []
    for shard, pieces in enumerate(segments):
        open_run: list[int] | None = None
        for start, end, is_counted in pieces:
            if not is_counted:
                open_run = None
            elif open_run is not None:
                open_run[1] = end
                runs[-1] = (shard, open_run[0], end)
            else:
                open_run = [start, end]
                runs.append((shard, start, end))
    return runs


def sum_of_squares(grads: Sequence[torch.Tensor], runs: Sequence[Run], device: torch.device) -> torch.Tensor:
    """Sum of squares of the counted gradients of this rank, fp64 [1] on `device`; each run is summed in fp32.

    NaN or inf anywhere makes the result non-finite. No host synchronization.
    """
    if not runs:
        return torch.zeros(1, dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(grads[shard][start:end], dtype=torch.float32) for shard, start, end in runs]
    return torch.stack(norms).double().square().sum().reshape(1)
