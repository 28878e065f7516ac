"""InterleavedAdamW over parameters that FSDP2 has sharded over two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import fsdp_cases

PLACEMENTS = [
    dict(offload_resident_fraction=1.0),
    dict(offload_resident_fraction=0.0, offload_gpu_share=0.5),
    dict(offload_resident_fraction=0.3, offload_gpu_share=0.0),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_parameters(pools, cache, dtype):
    """Every placement has the resident run's bits on both ranks; weights and norms are those of torch's own AdamW."""
    for results in pools(2).run(fsdp_cases.run, cache, dtype, PLACEMENTS):
        weights, _, norms = results[0]
        fsdp_cases.assert_resident_bits(results[0], [results[1], results[2]])
        torch_weights, _, torch_norms = results[len(PLACEMENTS)]
        assert max(norms) > fsdp_cases.CLIP
        assert norms == pytest.approx(torch_norms, rel=1e-5 if dtype == "float32" else 2e-2)
        tolerance = 2e-5 if dtype == "float32" else 2e-2
        for mine, theirs in zip(weights, torch_weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_weights(pools, cache, dtype):
    """Weights that are loaded beside a state, or that it holds, are there before the next step and behind it."""
    for found in pools(2).run(fsdp_cases.loads, cache, dtype):
        assert len(found) == 4 and all(found.values()), found


def test_a_mesh_of_two_dimensions_is_refused(pools, cache):
    """One sentence that says what is allowed."""
    for message in pools(2).run(fsdp_cases.refused, cache):
        assert "mesh of one dimension" in message
