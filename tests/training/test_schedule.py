"""Learning rates: the first update, what the log shows, skipped updates, and every shape of decay."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron.training.schedule import build_scheduler, learning_rates
from tests.training.runs import settings


class Groups:
    """Stands for an optimizer: the scheduler and the log read and write its groups only."""

    def __init__(self, decoupled=False):
        self.param_groups = [
            {"lr": 1e-2, "max_lr": 1e-2, "min_lr": 1e-3, "wd_mult": 1.0},
            {"lr": 1e-2, "max_lr": 1e-2, "min_lr": 1e-3, "wd_mult": 0.0},
        ]
        if decoupled:
            self.param_groups.append({"max_lr": 2e-2, "min_lr": 2e-3, "wd_mult": 1.0, "is_decoupled_lr": True})


def rates(words, num_steps, optimizer=None):
    """Return the rate used by each update and the rate shown after it."""
    config = settings(f"--min-lr 1e-3 {words}")
    optimizer = optimizer or Groups()
    scheduler = build_scheduler(config, optimizer)
    used, shown = [], []
    for _ in range(num_steps):
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=config.batch.global_batch_size)
        shown.append(learning_rates(optimizer)[0])
    return used, shown


def test_warmup_starts_at_its_init_and_log_shows_the_next():
    """With a warm-up the first update uses --lr-warmup-init, and the log line shows the rate of the next update."""
    used, shown = rates("--train-iters 10 --lr-warmup-iters 4 --lr-decay-style constant", 6)
    assert used == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01], abs=1e-12)
    assert shown[:-1] == used[1:]


@pytest.mark.parametrize(
    ("style", "at"),
    [
        ("linear", lambda part: 1 - part),
        ("cosine", lambda part: 0.5 * (1 + math.cos(math.pi * part))),
    ],
)
def test_decay_styles(style, at):
    """Linear and cosine decay go from --lr to --min-lr along their formulas."""
    used, _ = rates(f"--train-iters 8 --lr-decay-style {style}", 8)
    assert used == pytest.approx([1e-3 + 9e-3 * at(step / 8) for step in range(8)], rel=1e-9)


def test_inverse_square_root():
    """Inverse square root decays with the square root of the steps since the start."""
    used, _ = rates("--train-iters 400 --lr-warmup-iters 4 --lr-decay-style inverse-square-root", 400)
    assert used[9] == pytest.approx(1e-2 * (4 / 9) ** 0.5, rel=1e-9)
    assert used[-1] == pytest.approx(1e-2 * (4 / 399) ** 0.5, rel=1e-9)


@pytest.mark.parametrize(("style", "half"), [("linear", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("cosine", 0.5)])
def test_wsd(style, half):
    """WSD stays at --lr and decays in its last phase only."""
    words = f"--train-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style {style}"
    used, _ = rates(words, 10)
    assert used[:7] == pytest.approx([1e-2] * 7, rel=1e-12)
    assert used[8] == pytest.approx(1e-3 + 9e-3 * half, rel=1e-9)


def test_warmup_by_fraction_and_by_samples():
    """A fraction of the decay and a number of samples give the same warm-up as the iterations they stand for."""
    iterations, _ = rates("--train-iters 10 --lr-warmup-iters 5", 10)
    fraction, _ = rates("--train-iters 10 --lr-warmup-fraction 0.5", 10)
    samples, _ = rates("--train-samples 40 --lr-warmup-samples 20", 10)
    assert iterations == fraction == samples


def test_skipped_updates_do_not_advance():
    """A step that the loop skips leaves the schedule where it is: only `step` moves it, by samples."""
    config = settings("--train-iters 10 --lr-warmup-iters 4")
    optimizer = Groups()
    scheduler = build_scheduler(config, optimizer)
    scheduler.step(increment=4)
    assert scheduler.num_steps == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


def test_weight_decay_reaches_the_groups():
    """Weight decay is written into each group, times its factor, and grows if asked to."""
    config = settings(
        "--train-iters 10 --weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0.0 "
        "--end-weight-decay 0.1"
    )
    optimizer = Groups()
    scheduler = build_scheduler(config, optimizer)
    scheduler.step(increment=20)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.0])


def test_decoupled_rate_is_shown_apart():
    """Embeddings and output follow their own rates, which are reported beside the ordinary one."""
    optimizer = Groups(decoupled=True)
    rates("--train-iters 8 --lr-decay-style linear --decoupled-lr 2e-2", 4, optimizer)
    plain, decoupled = learning_rates(optimizer)
    assert decoupled == pytest.approx(2 * plain)


def test_missing_rate_is_refused():
    """Training without --lr is refused in a sentence."""
    config = settings("--train-iters 4")
    config = dataclasses.replace(config, lr=dataclasses.replace(config.lr, lr=None))
    with pytest.raises(ValueError, match="--lr is not given"):
        build_scheduler(config, Groups())
