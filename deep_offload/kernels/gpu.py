"""The Adam update as one Triton kernel with the bits of `reference.py`, and the upcast of 16-bit gradients.

Import this module lazily, where a GPU is used: it needs triton. What keeps the bits: no contraction
(`enable_fp_fusion=False`), division and square root rounded to nearest (`div_rn`, `sqrt_rn`; Triton's plain ones are
approximations), and scalars that come from the same fp32 table as on the CPU. bf16 goes in and out as integers, so that
no conversion of the compiler can choose another rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deep_offload.kernels import scalars as col
from deep_offload.kernels.reference import check_storage
from deep_offload.kernels.scalars import round_to_fp32
from deep_offload.plan.layout import MasterStorage

BLOCK = 2048
"""Elements of one program, at most."""
_NUM_WARPS = 8
_ALIGNMENT = 16  # elements: what Triton needs to know of an offset to use 16-byte accesses for every type

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

# Kinds of an array's elements, as the kernel sees them.
_NONE = tl.constexpr(0)
_FP32 = tl.constexpr(1)
_BF16 = tl.constexpr(2)  # behind a pointer to int16
_FP16 = tl.constexpr(3)
_KIND = {None: _NONE, torch.float32: _FP32, torch.bfloat16: _BF16, torch.float16: _FP16}

_FULL = tl.constexpr(0)
_SPLIT = tl.constexpr(1)
_WEIGHT = tl.constexpr(2)
_STORAGE = {MasterStorage.FULL: _FULL, MasterStorage.SPLIT: _SPLIT, MasterStorage.WEIGHT: _WEIGHT}


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """A subgroup's segments, cut for the kernel; built once per placement, valid for every step.

    blocks: int32 [num_blocks, 3] rows (start, end, class) on the device, none longer than BLOCK and none across a
    segment's border, owned by the table; None where one segment covers all, then `index` is its class.
    is_aligned: every start and end is a multiple of 16 elements.
    """

    numel: int
    num_blocks: int
    index: int
    is_aligned: bool
    blocks: Tensor | None

    @classmethod
    def build(cls, segments: Tensor, device: torch.device) -> SegmentTable:
        """Cut `segments` (int64 [k, 3] on the CPU, covering [0, numel) in order) into blocks on `device`."""
        starts, ends, classes = segments.unbind(1)
        numel = int(ends[-1]) if len(segments) else 0
        if numel >= 2**31:
            raise ValueError(f"a subgroup of {numel} elements was given; the GPU's kernel takes fewer than 2**31")
        if len(segments) <= 1:
            index = int(classes[0]) if len(segments) else 0
            return cls(numel, triton.cdiv(numel, BLOCK), index, False, None)
        num_blocks = (ends - starts + BLOCK - 1) // BLOCK
        first = torch.cumsum(num_blocks, 0) - num_blocks
        segment = torch.repeat_interleave(torch.arange(len(segments)), num_blocks)
        start = starts[segment] + (torch.arange(len(segment)) - first[segment]) * BLOCK
        end = torch.minimum(start + BLOCK, ends[segment])
        blocks = torch.stack((start, end, classes[segment]), dim=1).to(torch.int32).contiguous()
        is_aligned = bool((ends % _ALIGNMENT == 0).all())
        return cls(numel, len(segment), 0, is_aligned, blocks.to(device))


def adam_update(
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    segments: SegmentTable,
    scalars_device: Tensor,
    grad_scale: float,
    storage: MasterStorage,
    decoupled: bool,
) -> None:
    """Update in place on the current stream of the arrays' device; arguments and bits as `reference.adam_update`.

    `scalars_device`: fp32 [num_classes, NUM_SCALARS] on the device. One launch, which returns before it is done: the
    caller keeps every argument alive and unchanged until the stream has passed it. ValueError on a wrong argument.
    """
    check_storage(master, weight, storage)
    _check_arrays(master, exp_avg, exp_avg_sq, grad, weight, scalars_device, segments.numel)
    if segments.numel == 0:
        return
    nothing = exp_avg  # stands for an absent array; the kernel never touches it
    with torch.cuda.device_of(exp_avg):
        _adam_kernel[(segments.num_blocks,)](
            nothing if master is None else master,
            exp_avg,
            exp_avg_sq,
            _as_integers(grad),
            nothing if weight is None else _as_integers(weight),
            nothing if segments.blocks is None else segments.blocks,
            scalars_device,
            round_to_fp32(grad_scale),
            segments.numel,
            segments.index,
            HAS_TABLE=segments.blocks is not None,
            IS_ALIGNED=segments.is_aligned,
            GRAD=_KIND[grad.dtype].value,
            OUT=_KIND[None if weight is None else weight.dtype].value,
            STORAGE=_STORAGE[storage].value,
            DECOUPLED=decoupled,
            SIZE=BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def upcast_into(target: Tensor, source: Tensor) -> None:
    """Write the bf16 or fp16 `source` [numel] (on a GPU) as fp32 into `target` [numel], on the current stream.

    `target` lies on the same device or in host memory registered with CUDA; there, wait for the stream before reading.
    """
    if target.dtype is not torch.float32 or source.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"upcast_into writes float32 from bfloat16 or float16, got {target.dtype} and {source.dtype}")
    if target.numel() != source.numel() or not target.is_contiguous() or not source.is_contiguous():
        raise ValueError(
            f"upcast_into takes contiguous tensors of one size, got {target.numel()} and {source.numel()} elements"
        )
    if source.numel() == 0:
        return
    with torch.cuda.device_of(source):
        _upcast_kernel[(triton.cdiv(source.numel(), BLOCK),)](
            target if target.device == source.device else _HostPointer(target),
            _as_integers(source),
            source.numel(),
            SOURCE=_KIND[source.dtype].value,
            SIZE=BLOCK,
            num_warps=_NUM_WARPS,
        )


class _HostPointer:
    """Registered host memory as Triton sees an array; its address is the same on the device (unified addressing)."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _check_arrays(
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    scalars: Tensor,
    numel: int,
) -> None:
    arrays = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad, "weight": weight}
    for name, array in arrays.items():
        if array is None:
            continue
        if array.numel() != numel or array.device != exp_avg.device or not array.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor of {numel} elements on {exp_avg.device}, as the segments say, "
                f"got {array.numel()} elements on {array.device}"
            )
    for name in ("exp_avg", "exp_avg_sq"):
        array = arrays[name]
        if array is not None and array.dtype is not torch.float32:
            raise ValueError(f"{name}: expected float32, got {array.dtype}")
    if grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"grad: expected float32, bfloat16 or float16, got {grad.dtype}")
    if scalars.dtype is not torch.float32 or scalars.dim() != 2 or scalars.shape[1] != col.NUM_SCALARS:
        raise ValueError(f"scalars_device: expected float32 [num_classes, {col.NUM_SCALARS}], got {scalars.shape}")
    if scalars.device != exp_avg.device or not scalars.is_contiguous():
        raise ValueError(f"scalars_device: expected a contiguous tensor on {exp_avg.device}, got {scalars.device}")


@triton.jit
def _load_fp32(pointer, lane, mask, KIND: tl.constexpr):
    """The elements as fp32: exact for every kind."""
    value = tl.load(pointer + lane, mask=mask, other=0)
    if KIND == _BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == _FP16:
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
    if KIND == _BF16:
        upper, low = _round_bf16(master)
        tl.store(pointer + lane, upper.to(tl.int16), mask=mask)
    elif KIND == _FP16:
        tl.store(pointer + lane, master.to(tl.float16), mask=mask)
    elif KIND == _FP32:
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
def _adam_kernel(
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
        if STORAGE == _FULL:
            if OUT != _NONE:
                _store_weight(weight, lane, mask, tl.load(master + lane, mask=mask, other=0), OUT)
    else:
        if STORAGE == _FULL:
            p = tl.load(master + lane, mask=mask, other=0)
        elif STORAGE == _SPLIT:
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
        if STORAGE == _SPLIT:
            upper, low = _round_bf16(p)
            tl.store(weight + lane, upper.to(tl.int16), mask=mask)
            tl.store(master + lane, low.to(tl.int16), mask=mask)
        else:
            if STORAGE == _FULL:
                tl.store(master + lane, p, mask=mask)
            _store_weight(weight, lane, mask, p, OUT)


@triton.jit
def _upcast_kernel(target, source, numel, SOURCE: tl.constexpr, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = lane < numel
    tl.store(target + lane, _load_fp32(source, lane, mask, SOURCE), mask=mask)
