"""Python's garbage collection around training."""

import gc
from dataclasses import replace

import pytest

from megatron.training.arguments import parse_args
from megatron.training.lifecycle import GarbageCollection

WORDS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 15 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --use-cpu"
)


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("is_manual", [False, True])
def test_what_is_there_when_training_begins_is_left_alone(is_manual):
    """A collection during training looks at what came since, and at all again after the end."""
    config = replace(parse_args(WORDS.split(), world_size=1).lifecycle, manual_gc=is_manual, manual_gc_interval=2)
    seen = []

    def watch(phase, info):
        if phase == "stop":
            seen.append(info["collected"])

    garbage = GarbageCollection(config)
    try:
        kept = [Ring() for _ in range(1000)]
        garbage.before_training()
        assert gc.get_freeze_count() >= len(kept)
        assert not any(one is kept[0] for one in gc.get_objects())
        new = Ring()
        del new
        gc.callbacks.append(watch)
        for iteration in (1, 2):
            garbage.after_step(iteration)
        if is_manual:
            assert len(seen) == 1 and seen[0] >= 1
    finally:
        if watch in gc.callbacks:
            gc.callbacks.remove(watch)
        garbage.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0
