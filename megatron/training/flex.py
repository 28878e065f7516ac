"""Attention to a part of what lies behind (windows, documents) without a [seq, seq] mask: torch's flex_attention.

Every row of such a mask is a run of columns that ends at the row itself. So one number per row, where the run starts,
says everything: which blocks of 128 x 128 scores a kernel leaves out, and which scores of the others count.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron.training.compiler import can_compile

BLOCK = 128
"""Rows and columns of a block; sequences that are no multiple of it use a mask."""
_SHORTEST = 2048
"""Shorter sequences use a mask, which is small then: compiling takes longer than their kernels would save."""
_TYPES = (torch.bfloat16, torch.float16)

_Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_failure: list[str] = []


def is_usable(query: torch.Tensor, dropout: float) -> bool:
    """Whether `attend` is worth a try for queries [batch, heads, seq, width]: a long sequence on a GPU, in 16 bits."""
    size = query.size(2)
    return (
        query.is_cuda
        and query.dtype in _TYPES
        and dropout == 0.0
        and size >= _SHORTEST
        and size % BLOCK == 0
        and not torch.are_deterministic_algorithms_enabled()
        and not _failure
    )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockMask, scale: float | None
) -> torch.Tensor | None:
    """Return attention [batch, heads, seq, width]; None, and a note the first time, where it cannot be compiled."""
    if not can_compile():
        return _give_up("triton or a C compiler is missing")
    try:
        return _compiled()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.size(1) != k.size(1))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers raise anything, and a mask computes the same
        return _give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _give_up(reason: str) -> None:
    _failure.append(reason)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"note: attention uses a [seq, seq] mask, slower and larger: flex_attention failed ({reason})", flush=True
        )


# -- masks ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def window_blocks(seq_length: int, back: int, device: torch.device) -> BlockMask:
    """Return the mask of rows that see themselves and `back` columns before."""
    return blocks_of(window_starts(seq_length, back, device))


def window_starts(seq_length: int, back: int, device: torch.device) -> torch.Tensor:
    """Return int32 [1, seq]: the first column that each row sees."""
    rows = torch.arange(seq_length, dtype=torch.int32, device=device)
    return (rows - back).clamp_min(0).unsqueeze(0)


def document_starts(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return int32 [batch, seq]: the first column that each row sees.

    attention_mask: bool [batch, 1, seq, seq], True hides; each row must see an unbroken run that ends at itself.
    """
    size = attention_mask.size(-1)
    behind = torch.arange(size - 1, -1, -1, dtype=torch.int32, device=attention_mask.device)
    return attention_mask.squeeze(1).sum(-1, dtype=torch.int32) - behind


class DocumentBlocks:
    """The mask of the micro-batch at hand, made once for all layers that ask with the same tensor."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[torch.Tensor], int | None, BlockMask] | None = None

    def get(self, attention_mask: torch.Tensor, back: int | None) -> BlockMask:
        """Return the mask of documents (see `document_starts`), cut to a window of `back` columns if that is given."""
        if self._last is not None and self._last[0]() is attention_mask and self._last[1] == back:
            return self._last[2]
        starts = document_starts(attention_mask)
        if back is not None:
            starts = torch.maximum(starts, window_starts(starts.size(1), back, starts.device))
        blocks = blocks_of(starts)
        self._last = (weakref.ref(attention_mask), back, blocks)
        return blocks


document_blocks = DocumentBlocks()


def score_rule(starts: torch.Tensor) -> _Rule:
    """Return the function (batch, head, row, column) -> whether the row sees the column."""
    if starts.size(0) == 1:
        return lambda batch, head, row, column: (column <= row) & (column >= starts[0, row])
    return lambda batch, head, row, column: (column <= row) & (column >= starts[batch, row])


def blocks_of(starts: torch.Tensor) -> BlockMask:
    """Return flex_attention's mask for starts [batch or 1, seq], seq a multiple of BLOCK. Makes nothing [seq, seq]."""
    batch, size = starts.shape
    assert size % BLOCK == 0, size
    count = size // BLOCK
    grouped = starts.view(batch, count, BLOCK)
    first, last = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)  # of the rows of each block
    columns = torch.arange(count, dtype=torch.int32, device=starts.device)
    is_behind = columns[None, :] < columns[:, None]
    is_whole = is_behind & (columns * BLOCK >= last)
    is_part = (is_behind & ((columns + 1) * BLOCK > first) & ~is_whole) | torch.eye(
        count, dtype=torch.bool, device=starts.device
    )
    part, whole = (_ordered(mask.unsqueeze(1)) for mask in (is_part, is_whole))
    return BlockMask.from_kv_blocks(*part, *whole, BLOCK_SIZE=BLOCK, mask_mod=score_rule(starts))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of bool [..., rows, columns], how many are True, and the columns with those in front."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
