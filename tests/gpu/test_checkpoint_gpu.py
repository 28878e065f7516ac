"""Checkpoints on a GPU: bitwise resume, and memory that returns to what it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.cases import MODEL, OFFLOAD, Run, losses, words

SETTINGS = {
    "resident": "",
    "cpu": OFFLOAD + " --offload-gpu-share 0",
    "half": OFFLOAD + " --offload-gpu-share 0.5 --offload-split-master on",
    "gpu": OFFLOAD + " --offload-gpu-share 1",
}


@pytest.fixture(autouse=True)
def _world(tmp_path):
    """One rank over NCCL in this process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _train(argv):
    from megatron.core import parallel_state

    run = Run(argv)
    run.train()
    run.trainer.finish()
    result = losses(run.lines), run.entries()
    run.close()
    parallel_state.destroy_model_parallel()
    return result


@pytest.mark.parametrize("more", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_ten_and_ten_steps_are_twenty_on_the_gpu(tmp_path, setting, more):
    """Losses and every tensor after a resume are those of the uninterrupted run."""
    argv = words(MODEL, SETTINGS[setting], more, f"--hidden-dropout 0.1 --save-interval 10 --save {tmp_path / 'save'}")
    lines, entries = _train(argv)
    resumed, resumed_entries = _train([*argv, "--load", str(tmp_path / "save"), "--ckpt-step", "10"])
    assert len(lines) == 20 and resumed == lines[10:]
    assert resumed_entries == entries


@pytest.mark.parametrize("setting", SETTINGS)
def test_gpu_memory_returns_after_a_save(tmp_path, setting):
    """Allocated bytes after a save are those before it, within 1 %."""
    run = Run(words(MODEL, SETTINGS[setting], f"--save {tmp_path / 'save'} --save-interval 100 --exit-interval 3"))
    run.train()
    run.optimizer.synchronize()
    before = torch.cuda.memory_allocated()
    run.trainer.state.iteration += 1
    run.checkpoints.after_step(run.trainer, "test")
    after = torch.cuda.memory_allocated()
    run.close()
    assert abs(after - before) <= 0.01 * before
