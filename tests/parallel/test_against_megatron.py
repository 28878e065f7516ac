"""Our update against megatron-core's own DistributedOptimizer with torch's Adam, on several ranks."""

from __future__ import annotations

import pytest

from tests.parallel.parallel_cases import run_all
from tests.parallel.stock_cases import beside_stock, instead_of_ours

PLACE = "--offload-resident-fraction 0.2 --offload-gpu-share 0.5"
FP16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 15"
STEPS = "--train-iters 50 --global-batch-size 4"


@pytest.mark.parametrize(
    ("layout", "flags", "overflow_at"),
    [("dp2", "--bf16 --overlap-grad-reduce", 0), ("dp2", f"{FP16} --overlap-grad-reduce", 20), ("tp2", "", 0)],
)
def test_open_loop(train, layout, flags, overflow_at):
    """The same gradients and state for both at each of 50 steps: masters within rounding, norms to 1e-6."""
    outcomes = train(layout, [f"{flags} {STEPS} {PLACE}"], beside_stock, overflow_at)[0]
    for outcome in outcomes:
        worst, rows = outcome.notes
        assert 0 < worst <= 1.0
        assert len(rows) == 50
        for number, (ours, theirs, our_norm, their_norm, our_scale, their_scale) in enumerate(rows, start=1):
            assert ours == theirs == (number != overflow_at)
            assert our_scale == their_scale
            if ours:
                assert our_norm == pytest.approx(their_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "flags", "tolerance"), [("dp2", "", 1e-4), ("dp2", "--bf16", 1e-3), ("tp2", FP16, 1e-3)]
)
def test_closed_loop(train, layout, flags, tolerance):
    """Two trainings of 50 steps from the same weights: losses together at every step."""
    (ours,) = train(layout, [f"{flags} {STEPS} {PLACE}"], run_all)
    (theirs,) = train(layout, [f"{flags} {STEPS}"], instead_of_ours)
    assert len(ours[-1].losses) == len(theirs[-1].losses) == 50
    assert ours[-1].scales == theirs[-1].scales
    for mine, stock in zip(ours[-1].losses, theirs[-1].losses):
        assert float(mine) == pytest.approx(float(stock), rel=tolerance)
    assert float(ours[-1].losses[-1]) < float(ours[-1].losses[0]) - 0.5
