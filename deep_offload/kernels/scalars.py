"""The scalars of one Adam step: computed in Python doubles, rounded to fp32 once, read by every kernel.

`1 - beta` in fp32 arithmetic is off by up to 1e-5 of its value, and a bias correction computed by two kernels in
two ways would give two sets of bits. So nothing here is ever recomputed further down.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

BETA1 = 0
ONE_MINUS_BETA1 = 1
BETA2 = 2
ONE_MINUS_BETA2 = 3
EPS = 4
STEP_SIZE = 5
"""lr / (1 - beta1**step)"""
DECAY = 6
"""1 - lr * weight_decay, or 1 where the weight decay is an L2 term"""
SQRT_BIAS2 = 7
"""sqrt(1 - beta2**step)"""
WEIGHT_DECAY_L2 = 8
"""weight_decay where it is an L2 term, or 0"""
NUM_SCALARS = 9


@dataclass(frozen=True, slots=True)
class AdamClass:
    """What a set of parameters shares in one step; a segment's class is an index into a tuple of these.

    step: number of this update, counted from 1. decoupled: AdamW, else Adam with an L2 term. ValueError on nonsense.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a value of at least 0 and less than 1")
        for name in ("eps", "weight_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise ValueError(f"{name} is {getattr(self, name)}; give a finite value of at least 0")
        if not math.isfinite(self.lr):
            raise ValueError(f"lr is {self.lr}; give a finite value")
        if self.step < 1:
            raise ValueError(f"step is {self.step}; the first update is step 1")


def round_to_fp32(value: float) -> float:
    """Return `value` rounded to the nearest fp32, as a Python float; ValueError where it is beyond fp32's range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise ValueError(f"{value} is beyond the range of fp32; give a value below 3.4e38") from None


def scalar_row(adam: AdamClass) -> tuple[float, ...]:
    """Return the NUM_SCALARS fp32 values of `adam`, in the order of the column constants above."""
    row = [0.0] * NUM_SCALARS
    row[BETA1] = adam.beta1
    row[ONE_MINUS_BETA1] = 1.0 - adam.beta1
    row[BETA2] = adam.beta2
    row[ONE_MINUS_BETA2] = 1.0 - adam.beta2
    row[EPS] = adam.eps
    row[STEP_SIZE] = adam.lr / (1.0 - adam.beta1**adam.step)
    row[DECAY] = 1.0 - adam.lr * adam.weight_decay if adam.decoupled else 1.0
    row[SQRT_BIAS2] = math.sqrt(1.0 - adam.beta2**adam.step)
    row[WEIGHT_DECAY_L2] = 0.0 if adam.decoupled else adam.weight_decay
    return tuple(round_to_fp32(value) for value in row)
