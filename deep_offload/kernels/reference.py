"""The Adam update as eager torch: the specification that the CPU and the GPU kernel reproduce bit for bit.

Every `*`, `+`, `-`, `/` and square root below is one IEEE fp32 operation, in this order and association, never
contracted into a fused multiply-add:

    x = float32(grad) * grad_scale
    x = x + weight_decay * p                    (L2 only; with decoupled decay no such addition happens)
    m = beta1 * m + (1 - beta1) * x
    v = beta2 * v + (1 - beta2) * (x * x)
    d = sqrt(v) / sqrt(1 - beta2**step) + eps
    p = p * decay - step_size * (m / d)

The 16-bit weight is the master rounded to nearest: bf16 with ties away from zero, fp16 with ties to even. Ties away
make the master exactly its bf16 weight and 16 signed low bits: bits(master) = (weight << 16) + low. A NaN master
gives a NaN weight, and as a split master it keeps being NaN, not its payload; the payloads of NaNs are not specified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_offload.kernels import scalars as col
from deep_offload.kernels.scalars import AdamClass, round_to_fp32, scalar_row
from deep_offload.plan.layout import MasterStorage

HOLD = -1
"""Class of a segment whose state stays untouched in this step."""

_BF16_NAN = 0x7FC0


def adam_update(
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    segments: Tensor,
    scalars: Tensor,
    grad_scale: float,
    storage: MasterStorage,
    decoupled: bool,
) -> None:
    """Update `master`, `exp_avg`, `exp_avg_sq` and `weight` in place; all [numel], contiguous, on one device.

    FULL: `master` fp32, `weight` bf16, fp16, fp32 or None, written from the master. SPLIT: `master` int16 low bits,
    `weight` bf16. WEIGHT: `master` None, `weight` fp32. `grad` fp32, bf16 or fp16 of any scale; `segments` int64
    [k, 3] rows (start, end, class) on the CPU; `scalars` fp32 [num_classes, NUM_SCALARS] on the CPU. `weight` may be
    `grad` itself. A HOLD segment keeps its state; its FULL weight is still written. ValueError on a wrong argument.
    """
    rows = check_segments(segments, exp_avg.numel(), scalars)
    check_storage(master, weight, storage)
    scale = round_to_fp32(grad_scale)
    for start, end, index in rows:
        piece = slice(start, end)
        if index == HOLD:
            if storage is MasterStorage.FULL and weight is not None and master is not None:
                weight[piece] = round_to(master[piece], weight.dtype)
            continue
        row = [float(value) for value in scalars[index]]
        old = _load_master(master, weight, piece, storage)
        x = grad[piece].to(torch.float32) * scale
        new, m, v = _update(old, exp_avg[piece], exp_avg_sq[piece], x, row, decoupled)
        exp_avg[piece] = m
        exp_avg_sq[piece] = v
        _store_master(master, weight, piece, storage, new)


def _update(
    p: Tensor, m: Tensor, v: Tensor, x: Tensor, row: Sequence[float], decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (p, m, v); each line is one rounding per operation."""
    if not decoupled:
        x = x + p * row[col.WEIGHT_DECAY_L2]
    m = m * row[col.BETA1] + x * row[col.ONE_MINUS_BETA1]
    v = v * row[col.BETA2] + (x * x) * row[col.ONE_MINUS_BETA2]
    # Torch's fp32 square root on the CPU is not correctly rounded (one value in six is an ULP off). Through double it
    # is: 53 bits are more than twice 24 and two, so the second rounding changes nothing.
    root = torch.sqrt(v.to(torch.float64)).to(torch.float32)
    # A tensor on the same device: CUDA torch divides by a Python number through its reciprocal, which rounds twice.
    d = root / torch.full_like(v, row[col.SQRT_BIAS2]) + row[col.EPS]
    return p * row[col.DECAY] - (m / d) * row[col.STEP_SIZE], m, v


def _load_master(master: Tensor | None, weight: Tensor | None, piece: slice, storage: MasterStorage) -> Tensor:
    if storage is MasterStorage.FULL:
        assert master is not None
        return master[piece]
    assert weight is not None
    if storage is MasterStorage.WEIGHT:
        return weight[piece]
    assert master is not None
    return merge_master(weight[piece], master[piece])


def _store_master(
    master: Tensor | None, weight: Tensor | None, piece: slice, storage: MasterStorage, new: Tensor
) -> None:
    if storage is MasterStorage.FULL:
        assert master is not None
        master[piece] = new
        if weight is not None:
            weight[piece] = round_to(new, weight.dtype)
        return
    assert weight is not None
    if storage is MasterStorage.WEIGHT:
        weight[piece] = new
        return
    assert master is not None
    weight[piece], master[piece] = split_master(new)


def round_to(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 `master` as `dtype`: bf16 (nearest, ties away from zero), fp16 (ties to even), fp32 (copy)."""
    if dtype is torch.bfloat16:
        return split_master(master)[0]
    if dtype is torch.float16:
        return master.to(torch.float16)
    if dtype is torch.float32:
        return master.clone()
    raise ValueError(f"a weight of {dtype} was asked for; the kernels write bfloat16, float16 or float32")


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bf16 weight, int16 low) with bits(master) = (bits(weight) << 16) + low; new tensors of the same shape.

    Exact for every value that is no NaN; a NaN becomes the bf16 NaN with low bits 0.
    """
    bits = master.view(torch.int32)
    # Arithmetic shift: the int32 is the sign and the rounded upper half; the addition wraps for NaNs only.
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    nan = torch.isnan(master)
    upper = torch.where(nan, _BF16_NAN, upper)
    low = torch.where(nan, 0, low)
    return upper.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def merge_master(weight: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 master of a bf16 `weight` and its int16 `low` bits: the inverse of `split_master`."""
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return (upper + low.to(torch.int32)).view(torch.float32)


def scalar_table(classes: Sequence[AdamClass]) -> Tensor:
    """Return the fp32 [num_classes, NUM_SCALARS] CPU table that the kernels read."""
    return torch.tensor([scalar_row(adam) for adam in classes], dtype=torch.float32).reshape(-1, col.NUM_SCALARS)


def one_segment(numel: int, index: int = 0) -> Tensor:
    """Return the segment table [1, 3] in which all `numel` elements belong to class `index`."""
    return torch.tensor([[0, numel, index]], dtype=torch.int64)


def check_segments(segments: Tensor, numel: int, scalars: Tensor) -> list[tuple[int, int, int]]:
    """Return the rows (start, end, class) of `segments`; ValueError unless they cover [0, numel) in order."""
    if segments.dtype is not torch.int64 or segments.dim() != 2 or segments.shape[1] != 3:
        raise ValueError(
            f"segments: expected an int64 tensor [k, 3] of (start, end, class), "
            f"got {segments.dtype} of shape {list(segments.shape)}"
        )
    if scalars.dtype is not torch.float32 or scalars.dim() != 2 or scalars.shape[1] != col.NUM_SCALARS:
        raise ValueError(
            f"scalars: expected a float32 tensor [num_classes, {col.NUM_SCALARS}], "
            f"got {scalars.dtype} of shape {list(scalars.shape)}"
        )
    rows = [(start, end, index) for start, end, index in segments.tolist()]
    position = 0
    for row, (start, end, index) in enumerate(rows):
        if start != position or end <= start:
            raise ValueError(
                f"segments: row {row} is ({start}, {end}, {index}); it must start at {position} and not be empty"
            )
        if not HOLD <= index < scalars.shape[0]:
            raise ValueError(
                f"segments: row {row} has class {index}; the table of scalars has {scalars.shape[0]} rows, "
                f"so give 0 to {scalars.shape[0] - 1}, or {HOLD} to hold"
            )
        position = end
    if position != numel:
        raise ValueError(f"segments: they end at {position}; they must cover all {numel} elements")
    return rows


def check_storage(master: Tensor | None, weight: Tensor | None, storage: MasterStorage) -> None:
    """ValueError unless `master` and `weight` have the types that `storage` asks for."""
    master_dtype = None if master is None else master.dtype
    weight_dtype = None if weight is None else weight.dtype
    allowed: dict[MasterStorage, tuple[torch.dtype | None, tuple[torch.dtype | None, ...]]] = {
        MasterStorage.FULL: (torch.float32, (None, torch.bfloat16, torch.float16, torch.float32)),
        MasterStorage.SPLIT: (torch.int16, (torch.bfloat16,)),
        MasterStorage.WEIGHT: (None, (torch.float32,)),
    }
    want_master, want_weights = allowed[storage]
    if master_dtype != want_master or weight_dtype not in want_weights:
        raise ValueError(
            f"storage {storage.name} takes a master of {want_master} and a weight of "
            f"{' or '.join(str(w) for w in want_weights)}, got {master_dtype} and {weight_dtype}"
        )
