"""Layouts that start from the same weights train alike; accumulated micro-batches are one large batch."""

from __future__ import annotations

import pytest

STEPS = "--train-iters 20 --lr-warmup-iters 2 --global-batch-size 4 --offload-resident-fraction 0.2"


@pytest.fixture(scope="module")
def weights(train, tmp_path_factory):
    """A checkpoint of one process after one step."""
    folder = tmp_path_factory.mktemp("weights") / "saved"
    train("one", [f"--train-iters 1 --lr-warmup-iters 0 --global-batch-size 4 --save {folder} --save-interval 1"])
    return f"--load {folder} --finetune --no-load-optim --no-load-rng"


@pytest.fixture(scope="module")
def want(train, weights):
    """Losses of one process."""
    (outcomes,) = train("one", [f"{STEPS} {weights}"])
    return [float(loss) for loss in outcomes[-1].losses]


@pytest.mark.parametrize(
    "layout",
    ["dp2", "tp2", "tp2 sp", "pp2", "pp2 virtual", "tp2 pp2"]
    + [pytest.param(name, marks=pytest.mark.full) for name in ("dp4", "tp2 dp2", "pp2 dp2", "tp2 sp pp2 virtual")],
)
def test_losses_agree_across_layouts(train, weights, want, layout):
    """20 steps in fp32 with the same global batch: losses within 1e-3."""
    (outcomes,) = train(layout, [f"{STEPS} {weights} --overlap-grad-reduce"])
    got = [float(loss) for loss in outcomes[-1].losses]
    assert len(got) == len(want) == 20
    assert got == pytest.approx(want, abs=1e-3)
    assert want[-1] < want[0] - 0.1


def test_accumulated_micro_batches_are_one_large_batch(train, weights):
    """8 micro-batches of 1, 2 of 4 and 1 of 8; a run that lost one of them would be another run."""
    batches = [f"--micro-batch-size {size} --global-batch-size 8" for size in (8, 4, 1)]
    flags = "--train-iters 10 --lr-warmup-iters 2 --offload-resident-fraction 0.2"
    runs = train("one", [f"{flags} {weights} {batch}" for batch in [*batches, "--global-batch-size 7"]])
    losses = [[float(loss) for loss in outcomes[-1].losses] for outcomes in runs]
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert losses[2] == pytest.approx(losses[0], abs=2e-5)
    assert losses[3] != pytest.approx(losses[0], abs=1e-3)
