"""Small transfers of the training loop: their bytes, and that they do not wait for a copy engine."""

import pytest
import torch

from deep_offload.optimizer import small_copies

CUDA = torch.device("cuda")
NUM_LARGE, LARGE = 16, 1 << 28


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (5000,), (16, 2048)])
def test_there_and_back(dtype, shape):
    """Every type and shape arrives as it was, from pinned, pageable and cut-out host memory."""
    whole = torch.randint(0, 256, (*shape, 8), dtype=torch.uint8)
    source = (whole if dtype in (torch.uint8, torch.bool) else whole.view(torch.int64)).to(dtype)[..., 0]
    for host in (source, source.contiguous(), source.contiguous().pin_memory()):
        there = small_copies.to_device(host, CUDA)
        assert there.is_cuda and there.dtype is dtype and there.shape == source.shape
        back = small_copies.to_host([there, there]).wait()
        assert all(torch.equal(copy, source) and copy.dtype is dtype for copy in back)


def test_memory_that_begins_between_words():
    """A slice at an odd place of either side arrives whole, and nothing beside it is written."""
    from deep_offload.kernels import gpu  # needs triton

    whole = torch.arange(9, dtype=torch.bfloat16)
    there = small_copies.to_device(whole[1:5], CUDA)
    assert torch.equal(there.cpu(), whole[1:5])
    assert torch.equal(small_copies.to_host([whole.to(CUDA)[1:5]]).wait()[0], whole[1:5])
    target = torch.zeros(9, dtype=torch.bfloat16, device=CUDA)
    gpu.copy_past_engines(target[1:5], whole[4:8].pin_memory())
    assert target.tolist() == [0, 4, 5, 6, 7, 0, 0, 0, 0]
    assert small_copies.to_device(torch.empty(0), CUDA).numel() == 0
    assert small_copies.to_device(there, CUDA) is there


@pytest.fixture
def busy_engines():
    """Start copies of 4 GiB each way, 80 ms of work; returns an event at the end of each direction."""
    host = [torch.empty(LARGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(LARGE, dtype=torch.uint8, device=CUDA) for _ in range(2)]
    for _ in range(3):  # compiles, and allocates the pinned memory that later calls find
        small_copies.read(small_copies.to_device(torch.full([1], 7.0), CUDA) + 1)

    def start():
        torch.cuda.synchronize()
        events = []
        for target, source in ((device[0], host[0]), (host[1], device[1])):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(NUM_LARGE):
                    target.copy_(source, non_blocking=True)
                events.append(torch.cuda.current_stream().record_event())
        return events

    yield start
    torch.cuda.synchronize()


def test_small_copies_do_not_wait_for_large_ones(busy_engines):
    """A batch arrives and a value is read while both engines have work queued."""
    events = busy_engines()
    assert small_copies.read(small_copies.to_device(torch.full([1], 7.0), CUDA) + 1) == 8.0
    assert not any(event.query() for event in events)


def test_what_they_are_for(busy_engines):
    """The same through an engine waits for what is queued there, which the test above would notice."""
    small = torch.full([1], 7.0, device=CUDA)
    events = busy_engines()
    assert small.item() == 7.0
    assert events[1].query()


def test_sources_are_kept_until_they_were_read():
    """Pinned memory that is given back while a kernel waits to read it is not handed out again."""
    gate = torch.cuda.Stream()
    expected = [torch.full([4096], float(i)) for i in range(50)]
    with torch.cuda.stream(gate):
        torch.cuda._sleep(200_000_000)
        copies = [small_copies.to_device(tensor.pin_memory(), CUDA) for tensor in expected]
    overwritten = [torch.full([4096], -1.0).pin_memory() for _ in range(50)]
    torch.cuda.synchronize()
    assert all(torch.equal(copy.cpu(), tensor) for copy, tensor in zip(copies, expected))
    assert len(overwritten) == 50
