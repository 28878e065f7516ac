"""What recomputation adds to a backward pass: the forward pass of what is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_offload.model.gpt import NAMED_SHAPES, ParallelShape
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.run import RecomputeShape, RunShape, compute_seconds

H200 = BUILT_IN_PROFILES["h200"]
SHAPE = NAMED_SHAPES["7b"]
RUN = RunShape(model=SHAPE, parallel=ParallelShape(), seq_length=4096, micro_batch_size=1, global_batch_size=1)


def again(recompute: RecomputeShape, parallel: ParallelShape = RUN.parallel) -> float:
    """Forward passes that the backward pass repeats, as a part of one."""
    run = replace(RUN, parallel=parallel, recompute=recompute, global_batch_size=8)
    seconds = compute_seconds(run, H200)
    return seconds.backward / seconds.forward - 2


def test_selective_recomputation_costs_what_it_repeats():
    """The MLP its three matrices, attention its two products, norms nothing; together they add up."""
    attention = 2 * SHAPE.num_attention_heads * SHAPE.kv_channels * 4096
    mlp = 2 * 3 * SHAPE.hidden_size * SHAPE.ffn_hidden_size
    forward = SHAPE.training_flops(1, 4096) / 3
    for modules, flops in (
        (("mlp",), mlp),
        (("core_attn",), attention),
        (("layernorm",), 0),
        (("core_attn", "mlp", "layernorm"), attention + mlp),
    ):
        found = again(RecomputeShape(granularity="selective", modules=modules))
        assert found == pytest.approx(32 * flops / forward, rel=1e-9, abs=1e-12)
    assert again(RecomputeShape(granularity="selective", modules=("mlp",)), ParallelShape(tensor=2)) == pytest.approx(
        32 * mlp / forward
    )


@pytest.mark.parametrize(("virtual", "share"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_blocks_of_every_chunk_are_repeated(virtual, share):
    """Four layers of each chunk: with four chunks of four layers on two ranks, all of them."""
    block = RecomputeShape(granularity="full", method="block", num_layers=4)
    assert again(block, ParallelShape(pipeline=2, virtual=virtual)) == pytest.approx(share)
