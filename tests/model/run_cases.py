"""Runs on paper that several tests start from."""

from __future__ import annotations

from deep_offload.model.gpt import GPTShape, ParallelShape
from deep_offload.model.run import RunShape


def single_gpu_run(shape: GPTShape) -> RunShape:
    """A bf16 run of this shape on one GPU with 16-bit gradients and nothing recomputed."""
    return RunShape(
        model=shape,
        parallel=ParallelShape(),
        seq_length=2048,
        micro_batch_size=1,
        global_batch_size=1,
        grad_bytes=2,
    )
