# ruff: noqa: ANN001, ANN201, ANN202  (the arguments of Triton functions are pointers and blocks, which have no Python types)
"""The Adam update as one Triton kernel with the bits of `reference.py`, and copies of a few bytes.

What keeps the bits: no contraction (the launches say `enable_fp_fusion=False`), division and square root rounded to
nearest (`div_rn`, `sqrt_rn`; Triton's plain ones are approximations), and scalars from the same fp32 table as on the
CPU. bf16 goes in and out as integers, so that no conversion of the compiler can choose another rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deep_offload.kernels import scalars as col

_NUM_SCALARS = tl.constexpr(col.NUM_SCALARS)
_BETA1 = tl.constexpr(col.BETA1)
_ONE_MINUS_BETA1 = tl.constexpr(col.ONE_MINUS_BETA1)
_BETA2 = tl.constexpr(col.BETA2)
_ONE_MINUS_BETA2 = tl.constexpr(col.ONE_MINUS_BETA2)
_EPS = tl.constexpr(col.EPS)
_STEP_SIZE = tl.constexpr(col.STEP_SIZE)
_DECAY = tl.constexpr(col.DECAY)
_SQRT_BIAS2 = tl.constexpr(col.SQRT_BIAS2)
_WEIGHT_DECAY_L2 = tl.constexpr(col.WEIGHT_DECAY_L2)

# Kinds of an array's elements, as the kernels see them.
NONE = tl.constexpr(0)
FP32 = tl.constexpr(1)
BF16 = tl.constexpr(2)  # behind a pointer to int16
FP16 = tl.constexpr(3)

# Where the master is, see MasterStorage.
FULL = tl.constexpr(0)
SPLIT = tl.constexpr(1)
WEIGHT = tl.constexpr(2)


@triton.jit
def _load_fp32(pointer, lane, mask, KIND: tl.constexpr):
    """The elements as fp32: exact for every kind."""
    value = tl.load(pointer + lane, mask=mask, other=0)
    if KIND == BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        value = value.to(tl.float32)
    return value


@triton.jit
def _round_bf16(master):
    """(upper, low) as int32: bf16 to nearest, ties away from zero, and what it leaves; a NaN keeps neither."""
    bits = master.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    is_nan = master != master
    return tl.where(is_nan, 0x7FC0, upper), tl.where(is_nan, 0, low)


@triton.jit
def _store_weight(pointer, lane, mask, master, KIND: tl.constexpr):
    if KIND == BF16:
        upper, low = _round_bf16(master)
        tl.store(pointer + lane, upper.to(tl.int16), mask=mask)
    elif KIND == FP16:
        tl.store(pointer + lane, master.to(tl.float16), mask=mask)
    elif KIND == FP32:
        tl.store(pointer + lane, master, mask=mask)


@triton.jit
def _update(p, m, v, x, row, DECOUPLED: tl.constexpr):
    """One rounding per operation, as in reference.py."""
    if not DECOUPLED:
        x = x + tl.load(row + _WEIGHT_DECAY_L2) * p
    m = tl.load(row + _BETA1) * m + tl.load(row + _ONE_MINUS_BETA1) * x
    v = tl.load(row + _BETA2) * v + tl.load(row + _ONE_MINUS_BETA2) * (x * x)
    d = tl.div_rn(tl.sqrt_rn(v), tl.load(row + _SQRT_BIAS2)) + tl.load(row + _EPS)
    q = p * tl.load(row + _DECAY)
    return q - tl.load(row + _STEP_SIZE) * tl.div_rn(m, d), m, v


@triton.jit(do_not_specialize=["index"])
def adam_kernel(
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    weight,
    blocks,
    scalars,
    grad_scale,
    numel,
    index,
    HAS_TABLE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    GRAD: tl.constexpr,
    OUT: tl.constexpr,
    STORAGE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One block of one segment; `index` is its class where no table says so. Arguments are gpu.adam_update's."""
    block = tl.program_id(0)
    if HAS_TABLE:
        start = tl.load(blocks + 3 * block)
        end = tl.load(blocks + 3 * block + 1)
        index = tl.load(blocks + 3 * block + 2)
        if IS_ALIGNED:
            start = tl.multiple_of(start, 16)
            end = tl.multiple_of(end, 16)
    else:
        start = block * SIZE
        end = numel
    lane = start + tl.arange(0, SIZE)
    mask = lane < end
    if index < 0:  # HOLD: the state stays, a separate weight is still written
        if STORAGE == FULL:
            if OUT != NONE:
                _store_weight(weight, lane, mask, tl.load(master + lane, mask=mask, other=0), OUT)
    else:
        if STORAGE == FULL:
            p = tl.load(master + lane, mask=mask, other=0)
        elif STORAGE == SPLIT:
            upper = tl.load(weight + lane, mask=mask, other=0).to(tl.int32) << 16
            p = (upper + tl.load(master + lane, mask=mask, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            p = tl.load(weight + lane, mask=mask, other=0)
        m = tl.load(exp_avg + lane, mask=mask, other=0)
        v = tl.load(exp_avg_sq + lane, mask=mask, other=0)
        x = _load_fp32(grad, lane, mask, GRAD) * grad_scale
        p, m, v = _update(p, m, v, x, scalars + index * _NUM_SCALARS, DECOUPLED)
        tl.store(exp_avg + lane, m, mask=mask)
        tl.store(exp_avg_sq + lane, v, mask=mask)
        if STORAGE == SPLIT:
            upper, low = _round_bf16(p)
            tl.store(weight + lane, upper.to(tl.int16), mask=mask)
            tl.store(master + lane, low.to(tl.int16), mask=mask)
        else:
            if STORAGE == FULL:
                tl.store(master + lane, p, mask=mask)
            _store_weight(weight, lane, mask, p, OUT)


@triton.jit
def copy_kernel(target, source, numel, SIZE: tl.constexpr):
    """target [numel] = source [numel], words or bytes of any meaning."""
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = lane < numel
    tl.store(target + lane, tl.load(source + lane, mask=mask), mask=mask)
