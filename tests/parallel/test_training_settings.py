"""Recompute, dropout, loss masks, schedules, growing batches and clipping: offload stays invisible with all of them."""

from __future__ import annotations

import random

import pytest

from tests.parallel.cover import Row, greedy_cover, pairs_of, product_rows
from tests.parallel.oracle_cases import follow
from tests.parallel.parallel_cases import COMMON, run_all
from tests.training.corpora import write_corpus

RESIDENT = "--offload-resident-fraction 1"
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "uniform 1": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "uniform 2": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "block 1": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
}
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
PER_TOKEN = "--calculate-per-token-loss"
OPTIONS: dict[str, tuple] = {
    "layout": ("dp2", "tp2", "tp2 sp", "pp2", "pp2 virtual"),
    "precision": ("--bf16 --grad-reduce-in-bf16", "--fp16 --initial-loss-scale 1024", ""),
    "recompute": tuple(name for name in RECOMPUTE),
    "dropout": (DROPOUT, NO_DROPOUT),
    "loss": (PER_TOKEN, ""),
    "decay": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "warm-up": ("iterations", "samples", "fraction"),
    "batch": ("--global-batch-size 4", "--global-batch-size 4 --rampup-batch-size 2 2 4"),
    "clip": (0.5, 0),
    "place": (
        "--offload-resident-fraction 0 --offload-gpu-share 0.5 --offload-num-slots 2",
        "--offload-resident-fraction 0.2 --offload-gpu-share 0",
        "--offload-resident-fraction 0 --offload-stride 3",
    ),
    "overlap": ("", "--overlap-grad-reduce --overlap-param-gather"),
}


def _cover() -> list[Row]:
    """Few rows with every pair of values; chosen among some of the many thousand that exist."""
    luck = random.Random(3)
    rows = [{name: luck.choice(values) for name, values in OPTIONS.items()} for _ in range(300)]
    return greedy_cover([row for row in rows if is_possible(row)])


def is_possible(row: Row) -> bool:
    """Chunks of one layer cannot be cut into blocks of two."""
    return (row.get("layout"), row.get("recompute")) != ("pp2 virtual", "uniform 2")


ROWS = _cover()


def training_flags(row: Row) -> str:
    """All of a row but its placement. Samples and iterations stand for runs of about the same length."""
    decay = f"--lr-decay-style {row['decay']}"
    by_samples = row["warm-up"] == "samples"
    if row["decay"] == "WSD":
        decay += " --lr-wsd-decay-samples 8" if by_samples else " --lr-wsd-decay-iters 2"
    length = {
        "iterations": "--train-iters 4 --lr-warmup-iters 2",
        "fraction": "--train-iters 4 --lr-warmup-fraction 0.5",
        "samples": "--train-samples 16 --lr-warmup-samples 8",
    }[row["warm-up"]]
    words = (row["precision"], RECOMPUTE[row["recompute"]], row["dropout"], row["loss"], row["batch"], row["overlap"])
    return " ".join((*words, decay, length, f"--clip-grad {row['clip']}"))


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Flags for text of short documents, whose ends are left out of the loss: each sample counts another number."""
    luck = random.Random(1)
    documents = [[luck.randrange(300) for _ in range(luck.choice((1, 2, 3, 20)))] + [300] for _ in range(400)]
    folder = tmp_path_factory.mktemp("masked")
    prefix = write_corpus(folder / "text", documents)
    flags = COMMON
    for word in (
        "--mock-data ",
        "--train-iters 3 ",
        "--lr-warmup-iters 1 ",
        "--attention-dropout 0 --hidden-dropout 0 ",
    ):
        assert word in flags
        flags = flags.replace(word, "")
    return f"{flags} --data-path {prefix} --data-cache-path {folder} --split 100,0,0 --eod-mask-loss"


SHORT = ("dp2", "tp2 sp", "pp2 virtual")


@pytest.mark.parametrize(
    "layout",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in OPTIONS["layout"]],
)
def test_settings_pairwise(train, common, layout):
    """Every pair of settings: state is the oracle's bit for bit, losses and digest are the resident run's."""
    for clip in OPTIONS["clip"]:
        rows = [row for row in ROWS if row["layout"] == layout and row["clip"] == clip]
        flags = [training_flags(row) for row in rows]
        wants = train(layout, [f"{line} {RESIDENT}" for line in flags], run_all, common=common)
        gots = train(layout, [f"{line} {row['place']}" for line, row in zip(flags, rows)], follow, clip, common=common)
        for row, got, want in zip(rows, gots, wants):
            for outcome in got:
                differences, norms, num_clipped = outcome.notes
                assert differences == [], row
                assert num_clipped > 0 or not clip, row
                for own, reported in norms:  # a sum in fp32 over one bucket of all gradients, where nothing overlaps
                    assert reported == pytest.approx(own, rel=1e-5), row
            assert got[-1].losses == want[-1].losses and len(want[-1].losses) >= 4, row
            assert got[-1].norms == want[-1].norms, row
            assert got[0].digest == want[0].digest, row


def test_the_cover_is_a_cover():
    """Every pair of values occurs in a row."""
    covered = set().union(*map(pairs_of, ROWS))
    names = sorted(OPTIONS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pairs = filter(is_possible, product_rows({a: OPTIONS[a], b: OPTIONS[b]}))
            assert all(((a, row[a]), (b, row[b])) in covered for row in pairs)


@pytest.mark.parametrize("layout", ["tp2 sp", *(pytest.param(name, marks=pytest.mark.full) for name in ("tp2", "pp2"))])
def test_recompute_changes_no_bit(train, common, layout):
    """Dropout's masks are those of the first forward pass, whatever is recomputed; without it, another run."""
    flags = f"--bf16 --global-batch-size 4 --train-iters 3 --overlap-grad-reduce {OPTIONS['place'][0]}"
    names = [name for name in RECOMPUTE if is_possible({"layout": layout, "recompute": name})]
    lines = [f"{flags} {DROPOUT} {RECOMPUTE[name]}" for name in names]
    want, *gots, plain = train(layout, [*lines, f"{flags} {NO_DROPOUT}"], common=common)
    for got, name in zip(gots, names[1:]):
        assert got[-1].losses == want[-1].losses, name
        assert got[0].digest == want[0].digest, name
    assert plain[0].digest != want[0].digest


def test_tokens_count_alike(train, common):
    """Per-token loss: it does not matter in which micro-batch or on which rank a token is; without it, it does."""
    flags = f"--train-iters 4 --global-batch-size 8 --offload-resident-fraction 0.2 {NO_DROPOUT}"
    cases = [("one", 8), ("one", 2), ("one", 1), ("dp2", 1), ("tp2", 4)]
    losses = {}
    for loss in (PER_TOKEN, ""):
        for layout, size in cases[: 3 if loss == "" else None]:
            line = f"{flags} {loss} --micro-batch-size {size}"
            losses[loss, layout, size] = [float(x) for x in train(layout, [line], common=common)[0][-1].losses]
    for layout, size in cases[1:4]:
        assert losses[PER_TOKEN, layout, size] == pytest.approx(losses[PER_TOKEN, "one", 8], abs=2e-5), (layout, size)
    assert losses["", "one", 1] != pytest.approx(losses["", "one", 8], abs=1e-3)
