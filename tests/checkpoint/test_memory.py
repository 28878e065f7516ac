"""A save and a load stream: next to no memory beside the state itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from deep_offload.optimizer import checkpoint_boxes
from tests.checkpoint.cases import OFFLOAD, Run, words

MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 16 --max-position-embeddings 16 --bf16 "
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8000 --num-workers 0 --eval-iters 1 --offload-subgroup-numel 4000000"
)
BOX = 1 << 19


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class _Peak:
    """The highest resident size of the process inside the `with`, beyond that at its start."""

    def __enter__(self):
        self.bytes, self._done, self._start = 0, False, _resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._done:
            self.bytes = max(self.bytes, _resident() - self._start)
            time.sleep(0.001)

    def __exit__(self, *unused):
        self._done = True
        self._thread.join()


def _least(do, times=3):
    """The least extra memory of several calls: what the process's allocators do now and then is not theirs."""
    peaks = []
    for _ in range(times):
        with _Peak() as peak:
            do()
        peaks.append(peak.bytes)
    return min(peaks)


def _measure(argv, folder):
    """Save and load; returns bytes of the state, and of extra memory of a save and of a load."""
    part, checkpoint_boxes.Area.part.__defaults__ = checkpoint_boxes.Area.part.__defaults__, (BOX,)
    try:
        run = Run(words(argv, f"--save {folder} --save-interval 1"))

        def save():
            run.trainer.state.iteration += 1
            run.checkpoints.after_step(run.trainer, None)

        save()  # what torch allocates once is not the save's
        saving = _least(save)
        assert len(list(Path(folder).glob("iter_*"))) == 4
        state = sum(r.end - r.start for r in run.optimizer.param_state.ranges()) * 12
        run.checkpoints._config = type(run.checkpoints._config)(load=str(folder))
        loading = _least(lambda: run.checkpoints.load(run.trainer))
        run.close()
        return state, saving, loading
    finally:
        checkpoint_boxes.Area.part.__defaults__ = part


@pytest.mark.parametrize("flags", [OFFLOAD, OFFLOAD + " --offload-split-master on"], ids=["full", "split"])
def test_saves_and_loads_take_a_few_boxes(pool, tmp_path, flags):
    """Extra memory is a few boxes, whatever the state: far below a second copy, below 1 GiB with boxes of 128 MiB."""
    state, save, load = pool.run(_measure, f"{MODEL} {flags}", str(tmp_path), ranks=1, timeout_s=200)[0]
    assert state > 190 << 20
    assert save < 0.1 * state and save < 8 * BOX * 4, f"a save took {save >> 20} MiB beside {state >> 20} MiB of state"
    assert load < 0.1 * state, f"a load took {load >> 20} MiB beside {state >> 20} MiB of state"
    assert 8 * checkpoint_boxes.MAX_BOX_NUMEL * 4 <= 1 << 30
