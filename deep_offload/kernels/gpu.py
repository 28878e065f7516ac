"""The Adam update on the GPU: checks and launches of the kernels in `triton_adam.py`.

Import this module lazily, where a GPU is used: it needs triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deep_offload.kernels import scalars as col
from deep_offload.kernels import triton_adam
from deep_offload.kernels.reference import check_storage
from deep_offload.kernels.scalars import round_to_fp32
from deep_offload.plan.layout import MasterStorage

BLOCK = 2048
"""Elements of one program, at most."""
_MAX_NUMEL = 2**31 - BLOCK  # the kernels count elements in int32, up to the end of the last block
_COPY_BLOCK = 512
_NUM_WARPS = 8
_ALIGNMENT = 16  # elements: what Triton needs to know of an offset to use 16-byte accesses for every type
_KIND = {
    None: triton_adam.NONE.value,
    torch.float32: triton_adam.FP32.value,
    torch.bfloat16: triton_adam.BF16.value,
    torch.float16: triton_adam.FP16.value,
}
_STORAGE = {
    MasterStorage.FULL: triton_adam.FULL.value,
    MasterStorage.SPLIT: triton_adam.SPLIT.value,
    MasterStorage.WEIGHT: triton_adam.WEIGHT.value,
}


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
        if numel > _MAX_NUMEL:
            raise ValueError(f"a subgroup of {numel} elements was given; the GPU's kernel takes at most {_MAX_NUMEL}")
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
        triton_adam.adam_kernel[(segments.num_blocks,)](
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
            GRAD=_KIND[grad.dtype],
            OUT=_KIND[None if weight is None else weight.dtype],
            STORAGE=_STORAGE[storage],
            DECOUPLED=decoupled,
            SIZE=BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def copy_past_engines(target: Tensor, source: Tensor) -> None:
    """Copy the bytes of `source` into `target`, of equal type and shape, by a kernel on the current stream.

    One of them lies on a GPU; the other may be host memory registered with CUDA: keep it until the stream has passed.
    For a few bytes: no copy engine is used, in whose queue they would wait.
    """
    on_device = source if source.is_cuda else target
    if source.dtype is not target.dtype or source.shape != target.shape or not on_device.is_cuda:
        raise ValueError(
            f"copy_past_engines takes two tensors of one type and shape, one of them on a GPU, got {source.dtype} "
            f"{tuple(source.shape)} on {source.device} and {target.dtype} {tuple(target.shape)} on {target.device}"
        )
    if source.nbytes > _MAX_NUMEL:
        raise ValueError(f"copy_past_engines takes at most {_MAX_NUMEL} bytes, got {source.nbytes}; use copy_")
    if source.numel() == 0:
        return
    arrays = _as_words(target, source)
    numel = arrays[0].numel()
    with torch.cuda.device_of(on_device):
        triton_adam.copy_kernel[(triton.cdiv(numel, _COPY_BLOCK),)](
            *(array if array.is_cuda else _HostPointer(array) for array in arrays),
            numel,
            SIZE=_COPY_BLOCK,
            num_warps=4,
        )


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """The same memory as int32, or as bytes where one of them does not begin or end at a whole word."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("copy_past_engines takes contiguous tensors, got one with gaps")
    octets = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if all(one.numel() % 4 == 0 and one.data_ptr() % 4 == 0 for one in octets):
        return [one.view(torch.int32) for one in octets]
    return octets


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
