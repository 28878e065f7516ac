"""One micro-batch on its way from the loader to the device and to the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from deep_offload.optimizer.small_copies import to_device
from megatron.training.attention import causal_mask


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Samples and tokens of a micro-batch, and what documents do to positions and attention."""

    micro_batch_size: int
    seq_length: int
    end_of_document: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    is_packed: bool = False
    """Whether samples bring their own positions, which begin at 0 with each document."""
    num_ids: int | None = None
    """Token ids that the model can hold; others are refused. None accepts all."""

    def is_needed(self, is_first_stage: bool, is_last_stage: bool) -> bool:
        """Whether a pipeline stage reads data at all: inner ones do for document masks alone."""
        return is_first_stage or is_last_stage or self.reset_attention_mask or self.is_packed


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device: int64 and float32 [batch, seq]; attention_mask bool [batch, 1, seq, seq] or None.

    Fields are None on pipeline stages that read no data.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None


def next_batch(data: Iterator[dict[str, torch.Tensor]] | None, shape: BatchShape, device: torch.device) -> Batch:
    """Return the next micro-batch; all tensor-parallel ranks of a stage call it together.

    data: the loader's iterator on tensor-parallel rank 0, None on the others, which get its batch broadcast.
    """
    packed = _take(data, device, shape) if data is not None else None
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        if packed is None:
            size = (4 if shape.is_packed else 3, shape.micro_batch_size, shape.seq_length)
            packed = torch.empty(size, dtype=torch.int64, device=device)
        source = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(packed, source, group=parallel_state.get_tensor_model_parallel_group())
    assert packed is not None, "tensor-parallel rank 0 of a stage that reads data has a loader"
    tokens, labels, mask, *own_positions = packed.unbind(0)
    if own_positions:
        position_ids = own_positions[0]
        attention_mask = _document_mask((position_ids == 0).long().cumsum(dim=1))
    else:
        position_ids, attention_mask = _positions(tokens, shape)
    return Batch(tokens, labels, mask.float(), position_ids, attention_mask)


def _take(data: Iterator[dict[str, torch.Tensor]], device: torch.device, shape: BatchShape) -> torch.Tensor:
    """Return tokens, labels, loss mask (0 or 1) and, if packed, positions of the next batch: [3 or 4, batch, seq]."""
    sample = next(data, None)
    if sample is None:
        raise RuntimeError("the data ended before the run: it was started with other sizes than it goes on with")
    names = ("tokens", "labels", "loss_mask", "position_ids")
    parts = [sample[name] for name in names[: 4 if shape.is_packed else 3]]
    if shape.num_ids is not None:
        _check_ids(parts[:2], shape.num_ids)
    return torch.stack([to_device(part, device).long() for part in parts])


def _check_ids(parts: Iterable[torch.Tensor], num_ids: int) -> None:
    """Raise ValueError, one sentence, for a token id that is not in 0 .. num_ids - 1.

    On the host, where the batch still is: a device ends with an assertion that names nothing, and tensor-parallel
    ranks take an id that none of them holds for zeros.
    """
    for part in parts:
        smallest, largest = (int(bound) for bound in torch.aminmax(part))
        if smallest < 0 or largest >= num_ids:
            raise ValueError(
                f"the data holds token id {smallest if smallest < 0 else largest}, but the model's vocabulary has "
                f"{num_ids} ids: find the source with `python tools/data.py check DATA_PATH --vocab-size {num_ids}`, "
                "then name the tokenizer that made it, or raise --vocab-size (of NullTokenizer) or "
                "--make-vocab-size-divisible-by"
            )


def _positions(tokens: torch.Tensor, shape: BatchShape) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return position ids [batch, seq] and, where documents must not see each other, the mask [batch, 1, seq, seq]."""
    size = tokens.size(1)
    positions = torch.arange(size, device=tokens.device).expand_as(tokens)
    if not (shape.reset_position_ids or shape.reset_attention_mask):
        return positions, None
    ends = tokens == shape.end_of_document
    # An end-of-document token still belongs to the document that it ends.
    document = ends.long().cumsum(dim=1) - ends.long()
    mask = None
    if shape.reset_attention_mask:
        mask = _document_mask(document)
    if shape.reset_position_ids:
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        starts[:, 1:] = ends[:, :-1]
        first = torch.where(starts, positions, torch.zeros_like(positions)).cummax(dim=1).values
        positions = positions - first
    return positions, mask


def _document_mask(document: torch.Tensor) -> torch.Tensor:
    """Return bool [batch, 1, seq, seq], True hides: what comes later or has another number in document [batch, seq]."""
    other = document[:, :, None] != document[:, None, :]
    return (other | causal_mask(document.size(1), document.device)).unsqueeze(1)
