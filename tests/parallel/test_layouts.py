"""Every parallel layout: an offload setting gives the losses and the digest of the all-resident run of that layout."""

from __future__ import annotations

import pytest

from tests.parallel.cover import greedy_cover, pairs_of, product_rows, two_level_cover
from tests.parallel.parallel_cases import LAYOUTS, Outcome

PRECISIONS = {
    "bf16": "--bf16",
    "bf16 16-bit gradients": "--bf16 --grad-reduce-in-bf16",
    "fp16": "--fp16 --initial-loss-scale 1024 --loss-scale-window 2 --hysteresis 1",
    "fp32": "",
}
OVERLAPS = {
    "no overlap": "",
    "reduce": "--overlap-grad-reduce",
    "reduce and gather": "--overlap-grad-reduce --overlap-param-gather",
}
LARGE = ("tp2 sp pp2 virtual", "pp2 virtual dp2", "tp2 pp2 dp2")
"""Layouts of many ranks, for the long tests only."""
TRAININGS = greedy_cover(
    product_rows(
        {
            "layout": tuple(name for name in LAYOUTS if name not in ("one", *LARGE)),
            "precision": tuple(PRECISIONS),
            "overlap": tuple(OVERLAPS),
            "batch": (4, 8),
            "tied": (True, False),
        }
    )
)
PLACEMENTS = product_rows(
    {
        "place": (
            "--offload-gpu-share 0",
            "--offload-gpu-share 0.4",
            "--offload-gpu-share 1",
            "--offload-stride 3",
        ),
        "resident": (0.0, 0.5),
        "slots": (1, 3),
        "wire": ("fp32", "param"),
        "split": ("on", "off"),
    }
)
CASES = two_level_cover(TRAININGS, PLACEMENTS, each=2)
RESIDENT = "--offload-resident-fraction 1"


def training_flags(row: dict) -> str:
    tied = "" if row["tied"] else "--untie-embeddings-and-output-weights"
    return f"{PRECISIONS[row['precision']]} {OVERLAPS[row['overlap']]} --global-batch-size {row['batch']} {tied}"


def placement_flags(row: dict, precision: str) -> str:
    wire = row["wire"] if precision == "bf16 16-bit gradients" else "fp32"
    split = row["split"] if precision.startswith("bf16") else "off"
    return (
        f"{row['place']} --offload-resident-fraction {row['resident']} --offload-num-slots {row['slots']} "
        f"--offload-grad-wire {wire} --offload-split-master {split}"
    )


def check_same(got: list[Outcome], want: list[Outcome], what: str) -> None:
    """Same losses, norms and digest as the reference; replicas agree; and the model was large enough to mean it."""
    assert got[-1].losses == want[-1].losses and len(want[-1].losses) == 3, what
    assert got[-1].norms == want[-1].norms, what
    assert got[0].digest == want[0].digest and want[0].digest.startswith("sha256:"), what
    assert all(o.replicas_agree for o in got + want), f"{what}: ranks that hold the same parameter differ"
    assert all(o.num_subgroups >= 12 for o in got), [o.num_subgroups for o in got]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c[0].values()))
def test_offload_is_invisible(train, case):
    """Pairwise over layout, precision, overlap, accumulation, tied, share, resident fraction, slots, wire, split."""
    training, placements = case
    lines = [RESIDENT] + [placement_flags(row, training["precision"]) for row in placements]
    want, *got = train(training["layout"], [f"{training_flags(training)} {line}" for line in lines])
    for outcomes, line in zip(got, lines[1:]):
        check_same(outcomes, want, line)
        moved = {key: sum(o.traffic[key] for o in outcomes) for key in outcomes[0].traffic}
        assert moved["d2h_bytes"] > 0 and moved["h2d_bytes"] > 0
        assert (moved["cpu_params"] > 0) == ("share 1" not in line)
    if training["overlap"] != "no overlap" and "pp2" not in training["layout"]:
        assert all(o.num_buckets >= 4 for o in want)
    # With several data-parallel ranks gradients are final in backward only where their reduction overlaps it.
    reduces_after_backward = "dp" in training["layout"] and training["overlap"] == "no overlap"
    assert all((o.early > 0) != reduces_after_backward for outcomes in got for o in outcomes)


def test_the_cover_is_a_cover():
    """At least 60 combinations, every pair of values in one of them."""
    rows = [t | p for t, placements in CASES for p in placements]
    assert len(rows) >= 60
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == set().union(*(pairs_of(t | p) for t in TRAININGS for p in PLACEMENTS))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2 virtual", *LARGE])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_offload_is_invisible_with_all_parallelisms(train, layout, precision):
    """Tensor, sequence, interleaved pipeline and data parallelism together."""
    flags = f"{PRECISIONS[precision]} --global-batch-size 8 --overlap-grad-reduce --overlap-param-gather"
    flags += " --offload-subgroup-numel 1000"
    want, got = train(layout, [f"{flags} {RESIDENT}", f"{flags} --offload-resident-fraction 0.2 --offload-stride 2"])
    check_same(got, want, layout)
