"""megatron-core's own distributed optimizer loads what we save, and we load what it saves: fp32 state bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deep_offload.optimizer.checkpoint_state import areas_of_params
from megatron.training.checkpointing_format import CheckpointReader
from tests.checkpoint import stock
from tests.checkpoint.cases import MODEL, OFFLOAD, Run, train, words

LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
FLAGS = "--untie-embeddings-and-output-weights"


def _loaded(argv):
    """Load and return (key, kind, offset, shape, values) of this rank's state, with steps and iteration."""
    run = Run(argv)
    params = run.optimizer.param_state
    areas = areas_of_params(stock.model_state(run.trainer.chunks), params.params)
    out = []
    kinds = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    for where in params.ranges():
        for area in areas[where.number]:
            for box in area.part(where.start, where.end):
                for theirs, ours in kinds.items():
                    values = params.read(where, ours, box.flat_start, box.flat_start + box.numel).clone()
                    out.append((box.key, theirs, box.offset, box.shape, values))
    result = out, run.optimizer.num_steps, run.trainer.state.iteration
    run.close()
    return result


def _check_known(pieces, shapes):
    assert len(pieces) > 30
    for key, kind, offset, shape, values in pieces:
        where = tuple(slice(o, o + n) for o, n in zip(offset, shape))
        expected = stock.number(key, kind, shapes[key])[where]
        # The loading layout may pad the vocabulary with more rows than the file has.
        found = values.view(shape)[tuple(slice(0, n) for n in expected.shape)]
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), f"{key} {kind} at {offset}"


@pytest.mark.parametrize(("saving", "loading"), [("one", "tp2"), ("dp2", "pp2"), ("tp2", "dp2"), ("pp2", "one")])
def test_we_load_what_megatron_core_saves(pool, tmp_path, saving, loading):
    """Its fully reshardable format, under another layout: masters, both moments, steps and iteration."""
    ranks, flags = LAYOUTS[saving]
    folder = tmp_path / "iter_0000007"
    pool.run(stock.save, words(MODEL, FLAGS, flags), str(folder), "fully_reshardable", ranks=ranks)
    shapes = {key: tuple(entry.size) for key, entry in CheckpointReader(folder).tensors().items()}
    ranks, flags = LAYOUTS[loading]
    for pieces, steps, iteration in pool.run(
        _loaded, words(MODEL, FLAGS, flags, OFFLOAD, f"--load {tmp_path}"), ranks=ranks
    ):
        assert (steps, iteration) == (7, 7)
        _check_known(pieces, shapes)


@pytest.mark.parametrize(("saving", "loading"), [("one", "tp2"), ("dp2", "one"), ("tp2", "dp2"), ("pp2", "one")])
def test_megatron_core_loads_what_we_save(pool, tmp_path, saving, loading):
    """Plain dist_checkpointing.load and DistributedOptimizer.load_state_dict, nothing of ours in between."""
    ranks, flags = LAYOUTS[saving]
    argv = words(MODEL, FLAGS, flags, OFFLOAD, f"--save {tmp_path} --save-interval 9 --exit-interval 3")
    pool.run(train, argv, ranks=ranks)
    folder = Path(tmp_path, "iter_0000003")
    reader = CheckpointReader(folder)
    ranks, flags = LAYOUTS[loading]
    for pieces in pool.run(stock.load, words(MODEL, FLAGS, flags), str(folder), ranks=ranks):
        assert len(pieces) > 30
        for key, kind, offset, shape, values in pieces:
            expected = torch.zeros(shape)
            for where, part in reader.read(f"optimizer.state.{kind}.{key}", offset, shape):
                expected[where] = part
            assert torch.equal(values, expected.reshape(-1)), f"{key} {kind} at {offset}"
