"""Automatic residents on a GPU: by the estimate, by the measured peak, and where memory runs out all the same."""

import contextlib
import gc
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
import loop_cases
from loop_cases import LLAMA_LIKE, param_states, train
from residency_cases import counts

from deep_offload.model.residency import ESTIMATE_MARGIN, GPU_MEMORY_SHARE
from deep_offload.optimizer.residency import NUM_STEPS, memory_reader
from megatron.training import training

MODEL = LLAMA_LIKE.replace("48", "64")
LARGE = (
    LLAMA_LIKE.replace("--num-layers 4", "--num-layers 8")
    .replace("48", "1024")
    .replace("attention-heads 4", "attention-heads 16")
)
COMMON = "--bf16 --grad-reduce-in-bf16 --global-batch-size 4 --train-iters 8"
LARGE_COMMON = f"{COMMON} --vocab-size 8000 --ddp-bucket-size 20000000"
AUTO = "--offload-resident-fraction auto"


@pytest.fixture(scope="module")
def digests():
    """Digest of the all-resident run by model, computed once."""
    found = {}

    def get(model, common):
        if model not in found:
            found[model] = train(f"{common} --offload-resident-fraction 1", model=model).digest
        return found[model]

    return get


@pytest.fixture(autouse=True)
def clean_gpu():
    """Nothing of other tests is left on the GPU, and what limits it ends with the test."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def watch(seen):
    return lambda optimizer: seen.append((counts(optimizer._engine), optimizer.traffic()))


def test_all_stays_where_memory_is_free(digests):
    """A small model with no budget given has all its state on the GPU from the first step on."""
    seen = []
    got = train(f"{COMMON} {AUTO}", model=MODEL, before_step=watch(seen))
    assert got.digest == digests(MODEL, COMMON)
    assert got.digest == train(f"{COMMON} --offload-resident-fraction 0", model=MODEL).digest
    assert all(places["cpu"] == places["gpu"] == 0 < places["resident"] for places, _ in seen)
    assert got.traffic["h2d_bytes"] == got.traffic["d2h_bytes"] == 0
    assert "placement changed" not in got.text


@pytest.mark.parametrize("share", ["0", "0.5", "1"])
@pytest.mark.parametrize(
    "precision", ["--bf16 --grad-reduce-in-bf16", "--bf16", ""], ids=["bf16", "fp32-gradients", "fp32"]
)
def test_the_measured_peak_corrects_the_estimate(share, precision):
    """An estimate as large as the GPU leaves nothing for state; after three steps all stays, without changing a bit."""
    seen = []
    common = f"{precision} --global-batch-size 4 --train-iters 8"
    total = torch.cuda.mem_get_info()[1]
    with mock.patch.object(training, "estimated_bytes", lambda *_unused: total):
        got = train(f"{common} {AUTO} --offload-gpu-share {share}", model=MODEL, before_step=watch(seen))
    assert got.digest == train(f"{common} --offload-resident-fraction 1", model=MODEL).digest
    num = sum(seen[0][0].values())
    assert [places["resident"] for places, _ in seen] == [0] * NUM_STEPS + [num] * (8 - NUM_STEPS)
    assert f"placement changed after 3 steps: {num} more of {num} subgroups stay on the GPU" in got.text
    assert got.traffic["h2d_bytes"] == seen[NUM_STEPS][1]["h2d_bytes"] > 0
    assert got.traffic["d2h_bytes"] == seen[NUM_STEPS][1]["d2h_bytes"] > 0


def test_residents_that_find_no_room(digests):
    """A process that may take less than the GPU has free keeps what it can, says so once, and trains to the same bits;
    at the measured peak it finds no room either."""
    want, seen = digests(LARGE, LARGE_COMMON), []
    gc.collect()
    torch.cuda.empty_cache()
    build = training._build_optimizer

    def capped(config, chunks, report):
        num_params = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        room = torch.cuda.memory_allocated() + 8 * num_params  # of 10 bytes a parameter for all state
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        return build(config, chunks, report)

    def uncapped(optimizer):  # what the harness reads at the end is no part of the run
        torch.cuda.set_per_process_memory_fraction(1.0)
        return param_states(optimizer)

    with (
        mock.patch.object(training, "_build_optimizer", capped),
        mock.patch.object(loop_cases, "param_states", uncapped),
    ):
        got = train(f"{LARGE_COMMON} {AUTO}", model=LARGE, before_step=watch(seen))
    assert got.digest == want
    assert got.text.count("but it has no memory for them") == 2, got.text
    assert got.text.count("the placement stays as it is") == 1
    assert 0 < seen[0][0]["resident"] < sum(seen[0][0].values()) and seen[0][0] == seen[-1][0]


def test_another_program_on_the_gpu(digests):
    """Where others leave room for half of the state, a part stays, and 5 % of the GPU are free at the peak."""
    want, seen, memories, ballast, estimate = digests(LARGE, LARGE_COMMON), [], [], [], 300 << 20
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    build, read = training._build_optimizer, memory_reader(torch.device("cuda", 0))

    def crowded(config, chunks, report):
        memory = read()
        half = 5 * sum(p.numel() for chunk in chunks for p in chunk.parameters())
        left = (1 - GPU_MEMORY_SHARE) * memory.total + ESTIMATE_MARGIN * estimate + half
        ballast.append(torch.empty(int(memory.available - left), dtype=torch.uint8, device="cuda"))
        return build(config, chunks, report)

    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(training, "_build_optimizer", crowded),
        mock.patch.object(training, "estimated_bytes", lambda *_unused: estimate),
    ):
        stack.callback(ballast.clear)
        hooks = dict(before_step=watch(seen), after_step=lambda *_unused: memories.append(read()))
        got = train(f"{LARGE_COMMON} {AUTO}", model=LARGE, **hooks)
    memory = memories[-1]  # the digest behind the last step, and what the harness reads, are not trained
    others = memory.total - memory.free - memory.reserved
    assert memory.peak <= GPU_MEMORY_SHARE * memory.total - others
    assert got.digest == want
    assert 0 < seen[0][0]["resident"] < sum(seen[0][0].values())
    assert seen[-1][0]["resident"] >= seen[0][0]["resident"]
