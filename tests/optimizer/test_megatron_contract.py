"""What `optimizer/megatron_buffers.py` reads of megatron-core's DDP, a test each: a new release names itself."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from loop_cases import LLAMA_LIKE, train

CHUNK = [
    *"buffers expert_parallel_buffers bucket_groups expert_parallel_bucket_groups".split(),
    *"ddp_config config params_with_grad".split(),
]
BUFFER = "buckets param_index_map data_parallel_group".split()
BUCKET = "param_data grad_data offset params_list numel_unpadded gradient_scaling_factor".split()
GROUP = "buckets is_last_microbatch grad_reduce_handle start_param_sync param_gather_dispatched".split()


@pytest.fixture(scope="module")
def chunk(tmp_path_factory):
    """The DDP of a run that has just trained one step."""
    os.environ.setdefault("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.mktemp("cache")))
    seen = []
    train(
        "--bf16 --offload-resident-fraction 0 --offload-gpu-share 0.5 --train-iters 1",
        model=LLAMA_LIKE,
        before_step=lambda optimizer: seen.append(optimizer._chunks[0]),
    )
    return seen[0]


@pytest.mark.parametrize("name", CHUNK)
def test_chunk(chunk, name):
    """DistributedDataParallel has the attribute."""
    assert hasattr(chunk, name)


@pytest.mark.parametrize("name", BUFFER)
def test_buffer(chunk, name):
    """A parameter and gradient buffer has the attribute."""
    assert all(hasattr(buffer, name) for buffer in chunk.buffers)


@pytest.mark.parametrize("name", BUCKET)
def test_bucket(chunk, name):
    """A bucket has the attribute."""
    assert all(hasattr(bucket, name) for buffer in chunk.buffers for bucket in buffer.buckets)


@pytest.mark.parametrize("name", GROUP)
def test_bucket_group(chunk, name):
    """A bucket group has the attribute."""
    assert all(hasattr(group, name) for group in chunk.bucket_groups)


def test_meaning(chunk):
    """Offsets, ranges and views mean what the map of buffers takes them for."""
    assert len(chunk.buffers[0].buckets) >= 4
    for buffer in chunk.buffers:
        for bucket in buffer.buckets:
            assert bucket.param_data.numel() == bucket.grad_data.numel()
            for param in bucket.params_list:
                start, end, _number = buffer.param_index_map[param]
                local = slice(start - bucket.offset, end - bucket.offset)
                assert end - start == param.numel()
                assert param.data_ptr() == bucket.param_data[local].data_ptr()
                assert param.main_grad.data_ptr() == bucket.grad_data[local].data_ptr()
                assert torch.equal(param.detach().flatten(), bucket.param_data[local])
