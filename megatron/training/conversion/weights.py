"""How tensors of the two sides correspond: copied, or packed from several (query, key, value; gate and up)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["copy", "qkv", "gated", "vocabulary"]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Attention heads of one layer: query heads, groups (key and value heads), and the width of each."""

    num_heads: int
    num_groups: int
    width: int

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.width

    @property
    def group_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_groups * self.width


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor on the HuggingFace side."""

    name: str
    shape: Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of our tensors and the tensors it is made of. layer: its number, None outside the layers.

    key: its name in our checkpoints, where all layers share one; an axis for the layer comes first there.
    """

    key: str
    kind: Kind
    parts: tuple[Part, ...]
    layer: int | None = None

    @property
    def shape(self) -> Shape:
        """Shape of our tensor, without the axis of layers."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def pack_qkv(parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
    """Return the rows in megatron-core's order: for each group its query heads, then its key, then its value.

    parts: query, key and value projection [rows, ...]; weights and biases alike.
    """
    tail = parts[0].shape[1:]
    grouped = [part.reshape(heads.num_groups, -1, *tail) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *tail)


def unpack_qkv(packed: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """Return query, key and value: the inverse of `pack_qkv`."""
    tail = packed.shape[1:]
    queries = heads.query_rows // heads.num_groups
    grouped = packed.reshape(heads.num_groups, -1, *tail)
    parts = grouped.split([queries, heads.width, heads.width], dim=1)
    return [part.reshape(-1, *tail) for part in parts]


def pack(rule: Rule, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
    """Return our tensor from HuggingFace's, in the order of `rule.parts`."""
    if rule.kind == "qkv":
        return pack_qkv(parts, heads)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=0)  # gate first, then up


def unpack(rule: Rule, packed: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """Return HuggingFace's tensors from ours, in the order of `rule.parts`."""
    if rule.kind == "qkv":
        return unpack_qkv(packed, heads)
    return list(packed.split([part.shape[0] for part in rule.parts], dim=0))
