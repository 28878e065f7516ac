"""Each layout against an Adam written apart from the project; fp16 loss scaling over ranks."""

from __future__ import annotations

import pytest

from tests.parallel.oracle_cases import follow, with_overflow
from tests.parallel.parallel_cases import run_all

PLACES = ("--offload-resident-fraction 0.2 --offload-gpu-share 0.5", "--offload-resident-fraction 1")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp2", f"--bf16 {OVERLAP}"),
        ("tp2 sp", f"--fp16 --initial-loss-scale 256 {OVERLAP}"),
        ("pp2", "--bf16"),
        ("pp2 virtual", ""),
        ("dp2", f"--bf16 --grad-reduce-in-bf16 {OVERLAP}"),
        ("dp4", f"--fp16 --loss-scale 512 {OVERLAP}"),
        ("tp2 dp2", f"--bf16 --calculate-per-token-loss {OVERLAP} {UNTIED}"),
        ("tp2 pp2", "--fp16 --initial-loss-scale 256"),
        ("pp2 dp2", f"--bf16 {OVERLAP}"),
    ],
)
def test_oracle_reproduces_the_loop(train, layout, flags):
    """Masters, moments and weights of every rank are bitwise those of an Adam fed clones of the final gradients."""
    outcomes = train(layout, [f"{flags} --global-batch-size 8 {PLACES[0]}"], follow)[0]
    for rank, outcome in enumerate(outcomes):
        differences, norms, num_clipped = outcome.notes
        assert differences == [], f"rank {rank}"
        assert num_clipped >= 2
        for own, reported in norms:
            assert reported == pytest.approx(own, rel=1e-6)
        assert norms == outcomes[0].notes[1], "ranks report one norm"


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_overflow_on_one_rank_skips_the_step_on_all(train, layout, bad_rank):
    """The scale backs off, no bit of weights or state moves, and later steps are those of the resident run."""
    flags = f"--fp16 --initial-loss-scale 1024 --loss-scale-window 100 --hysteresis 1 --global-batch-size 4 {OVERLAP}"
    got, want = train(layout, [f"{flags} {place}" for place in PLACES], with_overflow, 2, bad_rank)
    for outcome in got:
        assert [updated for updated, _, _ in outcome.notes] == [True, False, True]
        assert [before == after for _, before, after in outcome.notes] == [False, True, False]
    assert got[-1].scales == ["1024.0", "512.0", "512.0"]
    assert got[-1].skipped == ["0", "1", "0"]
    assert [o.notes for o in got] == [o.notes for o in want]
    assert got[-1].losses == want[-1].losses


def test_constant_scale_skips_an_overflow_and_stays(train):
    """--loss-scale: the step is skipped, the scale is not changed."""
    flags = f"--fp16 --loss-scale 256 --global-batch-size 4 {OVERLAP}"
    got, want = train("dp2", [f"{flags} {place}" for place in PLACES], with_overflow, 2, 1)
    assert got[-1].scales == ["256.0"] * 3
    assert got[-1].skipped == ["0", "1", "0"]
    assert [o.notes for o in got] == [o.notes for o in want]


def test_a_real_overflow_finds_its_scale(train):
    """A first scale that is too large: steps are skipped until gradients fit, in the same way for every placement."""
    flags = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --train-iters 24 --global-batch-size 4"
    got, want = train("tp2 dp2", [f"{flags} {place}" for place in PLACES], run_all)
    skips = [int(n) for n in got[-1].skipped]
    assert sum(skips) > 4
    assert skips[-1] == 0
    assert float(got[-1].scales[-1]) == 2.0 ** (32 - sum(skips))
    assert (got[-1].skipped, got[-1].losses, got[0].digest) == (want[-1].skipped, want[-1].losses, want[0].digest)
