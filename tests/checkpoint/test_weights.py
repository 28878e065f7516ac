"""Weights alone, fine-tuning, other schedules and other precisions: what is taken from the file and what is not."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.training.checkpointing_format import CheckpointReader
from tests.checkpoint.cases import MODEL, OFFLOAD, Run, load, train, words
from tests.rank_pool import RankFailure


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A bf16 checkpoint of iteration 3 and what its run ended with."""
    folder = tmp_path_factory.mktemp("weights")
    argv = words(MODEL, OFFLOAD, f"--save {folder} --save-interval 100 --exit-interval 3")
    return folder, pool.run(train, argv, ranks=1)[0]


def _of_kind(entries, kind):
    return {name: value for (name, other), value in entries.items() if other == kind}


def _train(pool, folder, flags, *, model=MODEL):
    return pool.run(train, words(model, OFFLOAD, f"--load {folder}", flags), ranks=1)[0]


@pytest.mark.parametrize("flags", ["--finetune", "--no-load-optim"])
def test_masters_follow_loaded_weights(pool, saved, flags):
    """Two steps at rate 0 leave exactly the file's weights: no master of before comes back."""
    folder, before = saved
    zero = "--override-opt_param-scheduler --lr 0 --min-lr 0 --weight-decay 0"
    after = _train(pool, folder, f"{flags} {zero} --exit-interval {2 if flags == '--finetune' else 5}")
    assert _of_kind(after["entries"], "param") == _of_kind(before["entries"], "param")
    assert _of_kind(after["entries"], "master") != _of_kind(before["entries"], "master")  # rounded to bf16 once
    assert after["step"] == 2


def test_finetune_starts_at_zero(pool, saved):
    """--finetune: iteration, samples, schedule and moments of a new run."""
    folder, _ = saved
    result = pool.run(load, words(MODEL, OFFLOAD, f"--load {folder} --finetune"), ranks=1)[0]
    assert (result["iteration"], result["samples"], result["step"]) == (0, 0, 0)
    fresh = pool.run(load, words(MODEL, OFFLOAD), ranks=1)[0]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert _of_kind(result["entries"], kind) == _of_kind(fresh["entries"], kind)
    assert result["rates"] == fresh["rates"]


def test_no_load_optim_keeps_iteration_and_schedule(pool, saved):
    """Without optimizer state a run goes on at its iteration and learning rate, not at the warm-up."""
    folder, before = saved
    result = pool.run(load, words(MODEL, OFFLOAD, f"--load {folder} --no-load-optim"), ranks=1)[0]
    assert (result["iteration"], result["samples"], result["step"]) == (3, 12, 0)
    assert result["rates"] == before["rates"]
    assert any("optimizer starts anew" in line for line in result["lines"])


def test_a_file_without_optimizer_state_loads(pool, tmp_path):
    """--no-save-optim and --no-save-rng write weights alone, and a resume says what it lacks."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 9 --exit-interval 1 --no-save-optim --no-save-rng")
    pool.run(train, argv, ranks=1)
    reader = CheckpointReader(tmp_path / "iter_0000001")
    assert not [key for key in reader.tensors() if key.startswith("optimizer")]
    assert not [key for key in reader.objects() if "_extra_state" not in key]  # those belong to megatron-core's layers
    lines = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path}"), ranks=1)[0]["lines"]
    assert any("optimizer starts anew" in line for line in lines)
    assert any("random numbers start anew: the checkpoint has none" in line for line in lines)


def test_masters_take_the_precision_of_the_file(pool, tmp_path):
    """fp32 weights that a bf16 run loads alone keep all their bits in its masters."""
    single = MODEL.replace("--bf16", "")
    argv = words(single, OFFLOAD, f"--save {tmp_path} --save-interval 9 --exit-interval 2")
    before = pool.run(train, argv, ranks=1)[0]
    for flags in ("--finetune", ""):
        after = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path}", flags), ranks=1)[0]
        assert _of_kind(after["entries"], "master") == _of_kind(before["entries"], "param")
        assert _of_kind(after["entries"], "param") != _of_kind(before["entries"], "param")


def test_another_schedule_needs_a_word(pool, saved):
    """A formula that differs is refused in one sentence; with --override the new one counts, with --use the saved."""
    folder, before = saved
    other = "--lr 5e-3 --min-lr 5e-4"
    with pytest.raises(RankFailure, match=r"ValueError: --lr gives 0.005 and the checkpoint was saved with 0.01"):
        pool.run(load, words(MODEL, OFFLOAD, other, f"--load {folder}"), ranks=1)
    saved_rule = f"{other} --weight-decay 0.3 --use-checkpoint-opt_param-scheduler"
    used = pool.run(load, words(MODEL, OFFLOAD, saved_rule, f"--load {folder}"), ranks=1)[0]
    assert (used["rates"], used["decays"]) == (before["rates"], before["decays"])
    override = f"{other} --weight-decay 0.3 --override-opt_param-scheduler"
    new = pool.run(load, words(MODEL, OFFLOAD, override, f"--load {folder}"), ranks=1)[0]
    fresh = pool.run(train, words(MODEL, OFFLOAD, f"{other} --weight-decay 0.3 --exit-interval 3"), ranks=1)[0]
    assert (new["rates"], new["decays"]) == (fresh["rates"], fresh["decays"])


def _without_schedule(folder, name=None):
    """Change a checkpoint into another program's: no schedule, or one by its name of before, and no checksums."""
    path = folder / "iter_0000003" / "common.pt"
    common = torch.load(path, weights_only=False)
    schedule = common.pop("opt_param_scheduler")
    torch.save(common if name is None else {**common, name: schedule}, path)
    (path.parent / "SHA256SUMS").unlink()


@pytest.mark.parametrize("flags", ["", "--no-load-optim", "--override-opt_param-scheduler"])
def test_a_checkpoint_without_a_schedule_goes_on_at_its_samples(pool, saved, tmp_path, flags):
    """The rate is that of the iteration which the run goes on with, not of the warm-up, and one line says so."""
    _, before = saved
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    _without_schedule(tmp_path)
    after = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path}", flags), ranks=1)[0]
    assert (after["iteration"], after["samples"]) == (3, 12)
    assert (after["rates"], after["decays"]) == (before["rates"], before["decays"])
    said = [line for line in after["lines"] if "WARNING" in line]
    assert len(said) == 1 and "no learning rate schedule: the command line's goes on after 12 samples" in said[0]


def test_a_schedule_starts_anew_only_where_the_run_does(pool, saved, tmp_path):
    """--finetune of a checkpoint without one begins at the warm-up and says nothing; Megatron's old name is known."""
    fresh = pool.run(load, words(MODEL, OFFLOAD), ranks=1)[0]
    shutil.copytree(saved[0], tmp_path / "none")
    _without_schedule(tmp_path / "none")
    tuned = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path / 'none'} --finetune"), ranks=1)[0]
    assert tuned["rates"] == fresh["rates"] != saved[1]["rates"]
    shutil.copytree(saved[0], tmp_path / "old")
    _without_schedule(tmp_path / "old", "lr_scheduler")
    old = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path / 'old'}"), ranks=1)[0]
    assert old["rates"] == saved[1]["rates"]
    assert not [line for line in tuned["lines"] + old["lines"] if "no learning rate schedule" in line]


def test_another_model_is_refused_by_its_first_tensor(pool, saved):
    """A size that differs names the tensor and both shapes; a missing layer names the key."""
    folder, _ = saved
    wider = MODEL.replace("--hidden-size 32", "--hidden-size 64")
    with pytest.raises(
        RankFailure, match=r"ValueError: .*holds \S+ of shape \(.*\), this model's is \(.*use-checkpoint"
    ):
        pool.run(load, words(wider, OFFLOAD, f"--load {folder}"), ranks=1)
    with pytest.raises(RankFailure, match=r"ValueError: .*has no \S*output_layer.weight"):
        pool.run(load, words(MODEL, OFFLOAD, f"--load {folder} --untie-embeddings-and-output-weights"), ranks=1)


def test_frozen_parameters_are_restored(pool, tmp_path):
    """Parameters without optimizer state come back with every bit."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 9 --exit-interval 2 --seed 5")
    before = pool.run(_frozen, argv, ranks=2)
    after = pool.run(_frozen, words(MODEL, OFFLOAD, f"--load {tmp_path} --seed 6"), ranks=2)
    assert before == after
    assert len(before[0][0]) == 1
    other = pool.run(_frozen, words(MODEL, OFFLOAD, "--seed 6"), ranks=2)
    assert before != other


def _freeze_embedding(chunk):
    for name, param in chunk.named_parameters():
        param.requires_grad_("word_embeddings" not in name)


def _frozen(argv):
    run = Run(argv, _freeze_embedding)
    if "--save" in argv:
        run.train()
    weights = [p.detach() for p in run.trainer.chunks[0].parameters() if not p.requires_grad]
    out = ([int(w.view(torch.int16).sum(dtype=torch.int64)) for w in weights], run.entries())
    run.close()
    return out
