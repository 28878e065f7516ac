"""The scalars of a step."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest

from deep_offload.kernels import scalars as col
from deep_offload.kernels.scalars import AdamClass, round_to_fp32, scalar_row


def make(**changes) -> AdamClass:
    values = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)
    return AdamClass(**{**values, **changes})


def test_row_holds_each_scalar_computed_in_doubles_and_rounded_once():
    """Each column is the fp32 nearest to the double that the formula gives."""
    row = scalar_row(make())
    want = {
        col.BETA1: 0.9,
        col.ONE_MINUS_BETA1: 1 - 0.9,
        col.BETA2: 0.999,
        col.ONE_MINUS_BETA2: 1 - 0.999,
        col.EPS: 1e-8,
        col.STEP_SIZE: 1e-3 / (1 - 0.9**7),
        col.DECAY: 1 - 1e-3 * 0.1,
        col.SQRT_BIAS2: (1 - 0.999**7) ** 0.5,
        col.WEIGHT_DECAY_L2: 0.0,
    }
    assert len(row) == col.NUM_SCALARS == len(want)
    for column, value in want.items():
        assert row[column] == struct.unpack("f", struct.pack("f", value))[0], column


def test_one_minus_beta_is_not_the_difference_of_rounded_numbers():
    """1 - beta2 subtracted in fp32 is wrong by 1e-5 of its value, which is what the table must not hold."""
    exact = Fraction(1) - Fraction(0.999)
    ours = Fraction(scalar_row(make())[col.ONE_MINUS_BETA2])
    naive = Fraction(1) - Fraction(round_to_fp32(0.999))
    assert abs(ours - exact) / exact < Fraction(1, 2**24)
    assert abs(naive - exact) / exact > Fraction(1, 100_000)


def test_l2_moves_the_weight_decay_from_the_decay_to_its_own_column():
    """With an L2 term the decay is exactly 1 and the weight decay stands by itself."""
    row = scalar_row(make(decoupled=False))
    assert row[col.DECAY] == 1.0
    assert row[col.WEIGHT_DECAY_L2] == round_to_fp32(0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"beta1": 1.0}, "beta1 is 1.0; give a value of at least 0 and less than 1"),
        ({"beta2": -0.1}, "beta2 is -0.1; give a value of at least 0 and less than 1"),
        ({"eps": -1e-8}, "eps is -1e-08; give a finite value of at least 0"),
        ({"weight_decay": float("inf")}, "weight_decay is inf; give a finite value of at least 0"),
        ({"lr": float("nan")}, "lr is nan; give a finite value"),
        ({"step": 0}, "step is 0; the first update is step 1"),
    ],
)
def test_nonsense_is_refused_with_the_name_and_the_range(changes, sentence):
    """A value outside its range is refused when the class is made."""
    with pytest.raises(ValueError, match="^" + sentence.replace(".", r"\.") + "$"):
        make(**changes)


def test_a_scalar_beyond_fp32_is_refused():
    """A learning rate that fp32 cannot hold is an error, not an infinity."""
    with pytest.raises(ValueError, match="beyond the range of fp32"):
        scalar_row(make(lr=1e39))
