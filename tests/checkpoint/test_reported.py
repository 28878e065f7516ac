"""Situations that users of other systems reported about saving and resuming with offload, each reproduced.

The test names begin with the kind of report. Others are whole files here: offload-resume and loss-spike in
test_resume.py, ckpt-parallel in test_elastic.py, ckpt-save in test_crash.py and test_layout.py, lr-resume in
test_weights.py, ckpt-format in test_neutral.py and test_safety.py, nan-inf and host-oom in test_postmortem.py and
test_memory.py, launch (signals) in test_stop.py.
"""

from __future__ import annotations

import pytest
import torch

from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_inspect import Checkpoint
from tests.checkpoint.cases import MODEL, OFFLOAD, Run, load, train, words


def _keep_norms_in_fp32(chunk):
    for name, param in chunk.named_parameters():
        if "norm" in name:
            param.data = param.data.float()


def _mixed(argv):
    run = Run(argv, _keep_norms_in_fp32)
    dtypes = {p.dtype for p in run.optimizer.param_state.params}
    assert dtypes == {torch.float32, torch.bfloat16}
    if "--save" in argv:
        state = run.trainer.state
        for r in run.optimizer.param_state.ranges():
            for number, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
                noise = torch.rand(r.end - r.start, generator=torch.Generator().manual_seed(r.number * 3 + number))
                run.optimizer.param_state.write(r, kind, r.start, noise)
        run.optimizer.resume(5, None)
        run.optimizer.synchronize()
        state.iteration = 5
        run.checkpoints.after_step(run.trainer, "test")
    result = run.entries(), run.optimizer.num_steps
    run.close()
    return result


def test_offload_resume_with_parameters_kept_in_fp32(pool, tmp_path):
    """fp32 norms among bf16 weights: no missing key, the right step, every bit."""
    before = pool.run(_mixed, words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100"), ranks=2)
    after = pool.run(_mixed, words(MODEL, OFFLOAD, f"--load {tmp_path}"), ranks=2)
    assert before == after and after[0][1] == 5


def test_offload_resume_common_file_is_plain_and_the_same_for_all_ranks(pool, tmp_path):
    """No class of ours or of an optimizer in the saved groups: torch opens the file with weights_only=True."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-interval 1")
    pool.run(train, argv, ranks=2)
    common = torch.load(tmp_path / "iter_0000001" / "common.pt", weights_only=True)
    steps = {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]}
    assert steps == {1}
    plain = (int, float, str, bool, type(None), list, tuple, dict)
    assert all(isinstance(value, plain) for value in vars(common["args"]).values())


def test_offload_save_at_every_step_on_all_ranks(pool, tmp_path):
    """Saves between any two steps do not change a bit of what follows."""
    flags = "--exit-interval 4 --overlap-grad-reduce --overlap-param-gather"
    quiet = pool.run(train, words(MODEL, OFFLOAD, flags), ranks=2)
    saving = pool.run(train, words(MODEL, OFFLOAD, flags, f"--save {tmp_path} --save-interval 1"), ranks=2)
    assert saving[0]["entries"] == quiet[0]["entries"]
    assert saving[1]["losses"] == quiet[1]["losses"]
    assert layout.complete_iterations(tmp_path) == [1, 2, 3, 4]
    assert Checkpoint(tmp_path / "iter_0000004").digest() == saving[0]["digest"]


def test_offload_core_more_ranks_than_parameters(pool, tmp_path):
    """Ranks whose part of a bucket is padding or nothing save and load as well."""
    small = MODEL.replace("--num-layers 4 --hidden-size 32", "--num-layers 1 --hidden-size 8")
    small = small.replace("--group-query-attention --num-query-groups 2 ", "").replace("--swiglu ", "")
    small += " --ddp-bucket-size 1 --overlap-grad-reduce"
    argv = words(small, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-interval 2")
    before = pool.run(train, argv, ranks=4)
    after = pool.run(load, words(small, OFFLOAD, f"--load {tmp_path}"), ranks=4)
    alone = pool.run(load, words(small, f"--load {tmp_path}"), ranks=1)
    assert before[0]["entries"] == after[0]["entries"] == alone[0]["entries"]


def test_ckpt_format_extra_keys_are_no_tensors(pool, tmp_path):
    """Booleans and unknown words in the common file do no harm."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-interval 1")
    before = pool.run(train, argv, ranks=1)[0]
    path = tmp_path / "iter_0000001" / "common.pt"
    common = torch.load(path, weights_only=True)
    common |= {"padding": True, "unknown": {"x": [1, None, torch.zeros(2)]}}
    common["optimizer"]["optimizer"]["param_groups"][0]["padding"] = True
    torch.save(common, path)
    (path.parent / layout.CHECKSUMS).unlink()
    assert pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path}"), ranks=1)[0]["entries"] == before["entries"]


def test_lr_resume_uses_one_weight_decay_from_the_first_step(pool, tmp_path):
    """Saved with 0.1, resumed with 0 and the checkpoint's schedule: the first step decays as the later ones."""
    first = f"--weight-decay 0.1 --save {tmp_path} --save-interval 100 --exit-interval 2"
    pool.run(train, words(MODEL, OFFLOAD, first), ranks=1)
    resume = f"--weight-decay 0.0 --use-checkpoint-opt_param-scheduler --load {tmp_path} --exit-interval"
    at_load = pool.run(load, words(MODEL, OFFLOAD, resume, "3"), ranks=1)[0]["decays"]
    one_step = pool.run(train, words(MODEL, OFFLOAD, resume, "3"), ranks=1)[0]
    whole = pool.run(train, words(MODEL, OFFLOAD, "--weight-decay 0.1 --exit-interval 3"), ranks=1)[0]
    assert max(at_load) == 0.1 and at_load == one_step["decays"]
    assert one_step["entries"] == whole["entries"]


@pytest.mark.parametrize("flags", ["", "--ckpt-step 1"])
def test_use_checkpoint_args_takes_the_models_shape(tmp_path, pool, flags):
    """The model's flags may stay away; they come from the checkpoint that is loaded."""
    from megatron.training.arguments import build_config
    from megatron.training.checkpointing import saved_settings

    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 1 --exit-interval 2")
    before = pool.run(train, argv, ranks=1)[0]
    short = words(f"--use-checkpoint-args --load {tmp_path} --micro-batch-size 1 --lr 1e-2 --mock-data --train-iters 9")
    config = build_config([*short, *words(flags), "--bf16"], read_checkpoint_args=saved_settings)
    assert (config.model.hidden_size, config.model.num_layers, config.model.swiglu) == (32, 4, True)
    assert config.data.vocab_size == 500 and before["iteration"] == 2
