"""megatron-core's own distributed optimizer loads what we save, and we load what it saves: fp32 state bitwise."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from deep_offload.optimizer.checkpoint_state import areas_of_params
from megatron.training.checkpointing_format import CheckpointReader
from tests.checkpoint import stock
from tests.checkpoint.cases import MODEL, OFFLOAD, Run, load, train, words
from tests.rank_pool import RankFailure

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


@pytest.mark.parametrize(("saving", "loading"), [("one", "one"), ("dp2", "dp2"), ("tp2", "tp2"), ("dp2", "one")])
def test_we_load_state_by_buckets_under_the_same_layout(pool, tmp_path, saving, loading):
    """Megatron's default, dp_reshardable: the same tensor and pipeline sizes, other data-parallel ones."""
    ranks, flags = LAYOUTS[saving]
    folder = tmp_path / "iter_0000007"
    pool.run(stock.save, words(MODEL, FLAGS, flags), str(folder), "dp_reshardable", ranks=ranks)
    reader = CheckpointReader(folder)
    shapes = {key: tuple(entry.size) for key, entry in reader.tensors().items()}
    assert not [key for key in shapes if key.startswith("optimizer.state")]
    ranks, flags = LAYOUTS[loading]
    for pieces, steps, iteration in pool.run(
        _loaded, words(MODEL, FLAGS, flags, OFFLOAD, f"--load {tmp_path}"), ranks=ranks
    ):
        assert (steps, iteration) == (7, 7)
        _check_known(pieces, shapes)


def test_state_by_buckets_refuses_another_layout(pool, tmp_path):
    """One sentence with what to do; the weights alone load."""
    folder = tmp_path / "iter_0000007"
    pool.run(stock.save, words(MODEL, FLAGS), str(folder), "dp_reshardable", ranks=1)
    argv = words(MODEL, FLAGS, LAYOUTS["pp2"][1], OFFLOAD, f"--load {tmp_path}")
    with pytest.raises(
        RankFailure, match=r"ValueError: .*was saved by 1 model parallel ranks, this run has 2; .*--no-load"
    ):
        pool.run(_loaded, argv, ranks=2)
    pool.run(_loaded, [*argv, "--no-load-optim"], ranks=2)


def _save_torch_file(argv, folder):
    """Write what Megatron-LM's --ckpt-format torch writes, from a run's weights."""
    run = Run(argv)
    run.train()
    run.optimizer.synchronize()
    place = Path(folder, "iter_0000003", f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}")
    place.mkdir(parents=True)
    model = {k: v.clone() for k, v in unwrap_model(run.trainer.chunks[0]).state_dict().items() if v is not None}
    args = Namespace(consumed_train_samples=12, consumed_valid_samples=0, dtype=torch.bfloat16)
    torch.save({"model": model, "iteration": 3, "args": args, "checkpoint_version": 3.0}, place / "model_optim_rng.pt")
    Path(folder, "latest_checkpointed_iteration.txt").write_text("3")
    entries = run.entries()
    run.close()
    return entries


def test_old_torch_files_load_as_weights(pool, tmp_path):
    """mp_rank_NN/model_optim_rng.pt under the same sizes: weights, masters from them, iteration and samples."""
    flags = LAYOUTS["tp2"][1]
    before = pool.run(_save_torch_file, words(MODEL, FLAGS, flags), str(tmp_path), ranks=2)[0]
    after = pool.run(load, words(MODEL, FLAGS, flags, OFFLOAD, f"--load {tmp_path} --no-load-optim"), ranks=2)[0]
    for (name, kind), value in before.items():
        if kind == "param":
            assert after["entries"][(name, kind)] == value
    assert (after["iteration"], after["samples"], after["step"]) == (3, 12, 0)
    with pytest.raises(RankFailure, match="saved by 2 model parallel ranks and this run has 1"):
        pool.run(load, words(MODEL, FLAGS, OFFLOAD, f"--load {tmp_path}"), ranks=1)


def test_other_formats_get_one_sentence(pool, tmp_path):
    """zarr and others: the sentence names the format and what to run."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    argv = words(MODEL, OFFLOAD, f"--load {tmp_path}")
    with pytest.raises(RankFailure, match="ValueError: .*has the format 'zarr'.*--ckpt-format torch_dist"):
        pool.run(load, argv, ranks=1)
    (folder / "metadata.json").unlink()
    with pytest.raises(RankFailure, match="it is no checkpoint of Megatron"):
        pool.run(load, argv, ranks=1)
