"""Groups of parameters over ranks: decoupled rates, frozen parts, fp32 inside 16 bits, ranks without parameters."""

from __future__ import annotations

import pytest

from tests.parallel.model_cases import decoupled, edited

PLACES = ("--offload-resident-fraction 0.2 --offload-gpu-share 0.5", "--offload-resident-fraction 1")
FLAGS = "--bf16 --global-batch-size 4 --overlap-grad-reduce --overlap-param-gather"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(("layout", "tied"), [("pp2", ""), ("tp2 dp2", UNTIED)])
def test_decoupled_rate(train, layout, tied):
    """Embeddings and output take --decoupled-lr; masters are the oracle's, the digest is the resident run's."""
    flags = f"{FLAGS} {tied} --decoupled-lr 5e-3 --decoupled-min-lr 1e-4"
    got, want = train(layout, [f"{flags} {place}" for place in PLACES], decoupled)
    for outcome in got:
        differences, count, (plain, special) = outcome.notes
        assert differences == []
        assert count > 0 and special > plain
    assert (got[0].digest, got[-1].losses) == (want[0].digest, want[-1].losses)


@pytest.mark.parametrize(
    ("layout", "edit"),
    [
        ("dp2", "with_fp32_norms"),
        ("tp2 sp", "with_fp32_norms"),
        ("tp2 dp2", "with_frozen_attention"),
        ("dp4", "only_last_norm"),
    ],
)
def test_unusual_models(train, layout, edit):
    """Types side by side, parts without state, ranks without parameters: the oracle's bits and the resident digest."""
    got, want = train(layout, [f"{FLAGS} {UNTIED} {place}" for place in PLACES], edited, edit)
    assert [o.notes[0] for o in got] == [[]] * len(got)
    assert (got[0].digest, got[-1].losses) == (want[0].digest, want[-1].losses)
    counts = [o.notes[1] for o in got]
    if edit == "with_fp32_norms":
        assert all(set(count) == {"bfloat16", "float32"} for count in counts)
    elif edit == "only_last_norm":
        assert [sum(count.values()) for count in counts] == [32, 16, 0, 0]
