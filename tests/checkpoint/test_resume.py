"""Twenty steps are ten and ten with a new process between: losses, norms and digest equal to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from megatron.training.checkpointing import changed_data
from tests.checkpoint.cases import MODEL, OFFLOAD, VOCAB, Run, load, train, words
from tests.rank_pool import RankFailure

CASES = {
    "bf16 offload": (1, f"{OFFLOAD} --hidden-dropout 0.1 --attention-dropout 0.1 --rampup-batch-size 2 2 24"),
    "bf16 resident": (1, "--accumulate-allreduce-grads-in-fp32 --calculate-per-token-loss"),
    "fp16 offload dp2": (
        2,
        f"{OFFLOAD} --fp16 --initial-loss-scale 4194304 --loss-scale-window 4 --hysteresis 1 --offload-gpu-share 0.5",
    ),
    "fp32 tp2": (2, f"{OFFLOAD} --fp32 --tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
    "bf16 pp2 overlap": (
        2,
        f"{OFFLOAD} --offload-resident-fraction 0.5 --offload-split-master on --pipeline-model-parallel-size 2",
    ),
    "bf16 dp2 overlap": (
        2,
        f"{OFFLOAD} --overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights",
    ),
}


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Three indexed datasets with weights, as --data-path takes them."""
    folder = tmp_path_factory.mktemp("data")
    out = []
    for number, weight in enumerate((0.5, 0.3, 0.2)):
        prefix = str(folder / f"part{number}")
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        random = np.random.default_rng(number)
        for _ in range(60):
            builder.add_item(torch.from_numpy(random.integers(0, VOCAB - 1, 40)))
            builder.end_document()
        builder.finalize(get_idx_path(prefix))
        out += [str(weight), prefix]
    return " ".join(out)


def _flags(flags: str, blend: str, folder) -> list[str]:
    model = MODEL.replace("--mock-data", f"--data-path {blend} --split 90,5,5")
    for precision in ("--fp16", "--fp32"):
        if precision in flags:
            model = model.replace("--bf16", "")
    return words(model, flags.replace("--fp32", ""), f"--data-cache-path {folder}/cache --save-interval 100")


@pytest.mark.parametrize("case", CASES)
def test_ten_and_ten_steps_are_twenty(pool, blend, tmp_path, case):
    """The second ten run in processes that know nothing but the checkpoint, and repeat every logged digit."""
    ranks, flags = CASES[case]
    argv = _flags(flags, blend, tmp_path)
    whole = pool.run(train, argv, ranks=ranks)
    pool.run(train, [*argv, "--save", str(tmp_path / "save"), "--exit-interval", "10"], ranks=ranks)
    pool.close()
    rest = pool.run(train, [*argv, "--load", str(tmp_path / "save")], ranks=ranks)
    expected = [line for result in whole for line in result["losses"]]
    assert len(expected) == 20, "the log lines were not understood"
    assert [line for result in rest for line in result["losses"]] == expected[10:]
    assert rest[0]["entries"] == whole[0]["entries"]
    assert rest[0]["digest"] == whole[0]["digest"]
    assert (rest[0]["rates"], rest[0]["decays"]) == (whole[0]["rates"], whole[0]["decays"])
    assert (rest[0]["iteration"], rest[0]["samples"]) == (20, whole[0]["samples"])


def test_a_changed_blend_is_reported(pool, blend, tmp_path):
    """A resume with other weights of the sources says so; the same blend says nothing."""
    argv = _flags(OFFLOAD, blend, tmp_path)
    pool.run(train, [*argv, "--save", str(tmp_path / "save"), "--exit-interval", "1"], ranks=1)
    argv += ["--load", str(tmp_path / "save")]
    same = pool.run(load, argv, ranks=1)[0]["lines"]
    assert not [line for line in same if "--data-path" in line]
    other = [word.replace("0.3", "0.4") for word in argv]
    changed = pool.run(load, other, ranks=1)[0]["lines"]
    assert len([line for line in changed if "--data-path was" in line]) == 1


def test_another_order_of_the_data_is_reported(pool, blend, tmp_path):
    """A resume with another seed, loader or number of passes over a source says so; the same run says nothing."""
    argv = [*_flags(OFFLOAD, blend, tmp_path), "--lr-decay-iters", "20"]
    pool.run(train, [*argv, "--save", str(tmp_path / "save"), "--exit-interval", "1"], ranks=1)
    argv += ["--load", str(tmp_path / "save")]
    assert not [line for line in pool.run(load, argv, ranks=1)[0]["lines"] if "WARNING" in line]
    other = [*argv, *words("--seed 7 --dataloader-type cyclic --train-iters 200")]
    told = [line for line in pool.run(load, other, ranks=1)[0]["lines"] if "WARNING" in line]
    assert len(told) == 3
    assert "--dataloader-type was single and is cyclic" in told[0]
    assert "--seed was 1234 and is 7" in told[1]
    assert "training shuffled 1, 1, 1 passes over its data and now shuffles 3, 2, 2" in told[2]


def test_an_older_checkpoint_is_not_said_to_have_another_order():
    """A checkpoint that does not say its seed, sequence length, loader or --sft differs in none of them."""
    now = {"split": "9,1,0", "seed": 1, "seq_length": 8, "dataloader_type": "single", "sft": True}
    assert changed_data({"split": "9,1,0"}, now) == []
    [line] = changed_data(now | {"sft": False}, now)
    assert "--sft was not given and is given" in line


def test_validation_starts_again_where_its_data_ends(pool, blend, tmp_path):
    """A finished run that is started once more evaluates on the first samples, with a line, not behind the last."""
    argv = _flags(f"{OFFLOAD} --eval-interval 2", blend, tmp_path)
    argv += words(f"--train-iters 4 --lr-decay-iters 20 --save {tmp_path / 'save'}")
    pool.run(_to_the_end, argv, ranks=1)
    lines = pool.run(_to_the_end, [*argv, "--load", str(tmp_path / "save")], ranks=1)[0]
    assert any("validation starts at its first sample again, not after the 12 that were read" in line for line in lines)
    assert any("validation loss at iteration 4 on validation set" in line for line in lines)


def test_another_dropout_sequence_is_noticed(pool, blend, tmp_path):
    """Without its random numbers a resumed run differs: the comparison above can fail."""
    ranks, flags = CASES["bf16 offload"]
    argv = _flags(flags, blend, tmp_path)
    whole = pool.run(train, argv, ranks=1)[0]
    pool.run(train, [*argv, "--save", str(tmp_path / "save"), "--exit-interval", "10"], ranks=1)
    rest = pool.run(train, [*argv, "--load", str(tmp_path / "save"), "--no-load-rng"], ranks=1)[0]
    assert rest["losses"] != whole["losses"][10:]


def test_a_missing_checkpoint_is_a_warning_or_the_end(pool, tmp_path):
    """An empty directory gives random weights and a warning; with --exit-on-missing-checkpoint it ends the run."""
    argv = words(MODEL, OFFLOAD, f"--load {tmp_path}")
    assert any("WARNING" in line and "random weights" in line for line in pool.run(load, argv, ranks=1)[0]["lines"])
    with pytest.raises(RankFailure, match="holds no checkpoint, and --exit-on-missing-checkpoint"):
        pool.run(load, [*argv, "--exit-on-missing-checkpoint"], ranks=1)


def test_a_finished_run_that_is_started_again_writes_nothing(pool, tmp_path):
    """Nothing is left to do: the checkpoint stays the file that it was."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --train-iters 4 --lr-decay-iters 20")
    pool.run(_to_the_end, argv, ranks=1)
    common = tmp_path / "iter_0000004" / "common.pt"
    before = common.stat().st_mtime_ns, common.stat().st_ino
    lines = pool.run(_to_the_end, [*argv, "--load", str(tmp_path)], ranks=1)[0]
    assert (common.stat().st_mtime_ns, common.stat().st_ino) == before
    assert not any("saved checkpoint" in line for line in lines)


def test_a_checkpoint_loads_for_evaluation_alone(pool, tmp_path):
    """--skip-train has no learning rate, and needs none from the checkpoint."""
    argv = words(MODEL, OFFLOAD, f"--save {tmp_path} --save-interval 100 --exit-interval 2")
    before = pool.run(train, argv, ranks=1)[0]
    after = pool.run(load, words(MODEL, OFFLOAD, f"--load {tmp_path} --skip-train"), ranks=1)[0]
    assert after["entries"] == before["entries"]


@pytest.mark.parametrize(
    ("saving", "loading", "scale"),
    [
        ("--initial-loss-scale 4096", "--loss-scale 128", "128.0"),
        ("--loss-scale 128", "--initial-loss-scale 4096", "4096.0"),
        ("--initial-loss-scale 4096", "--initial-loss-scale 512", "4096.0"),
    ],
)
def test_a_given_loss_scale_counts(pool, tmp_path, saving, loading, scale):
    """--loss-scale is not replaced by the checkpoint's, which would never adjust: an overflow would skip every step."""
    argv = words(MODEL.replace("--bf16", "--fp16"), OFFLOAD, "--loss-scale-window 1000")
    save = words(f"--save {tmp_path} --save-interval 100 --exit-interval 2", saving)
    pool.run(train, [*argv, *save], ranks=1)
    lines = pool.run(train, [*argv, *words(f"--load {tmp_path} --exit-interval 4", loading)], ranks=1)[0]["lines"]
    shown = [part for line in lines for part in line.split("|") if "loss scale:" in part]
    assert [part.split(":")[1].strip() for part in shown] == [scale, scale]


def _to_the_end(argv):
    run = Run(argv)
    if run.trainer.state.iteration < run.config.num_iterations:
        run.train()
    run.trainer.finish()
    run.close()
    return run.lines
