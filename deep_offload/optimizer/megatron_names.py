"""Global names of a Megatron model's parameters, and their full tensors from all ranks' pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class NamedParam:
    """A parameter under the name it has in the whole model, whatever the pipeline layout.

    is_gated: rows are [gate; up], each split over tensor-parallel ranks on its own. is_vocabulary: rows beyond the real
    vocabulary are padding. is_tied_copy: another stage's copy of the first stage's embedding.
    """

    name: str
    param: torch.nn.Parameter
    is_gated: bool
    is_vocabulary: bool
    is_tied_copy: bool


def named_params(chunks: Sequence[torch.nn.Module]) -> list[NamedParam]:
    """All trainable parameters of this rank's model chunks."""
    out: list[NamedParam] = []
    for chunk in chunks:
        model = unwrap_model(chunk)
        offsets = _layer_numbers(model)
        gated = bool(getattr(model.config, "gated_linear_unit", False))
        for local, param in model.named_parameters():
            if not param.requires_grad:
                continue
            name = _global_name(local, offsets)
            tied = bool(getattr(model, "share_embeddings_and_output_weights", False)) and name == "output_layer.weight"
            out.append(
                NamedParam(
                    _VOCABULARY[0] if tied else name, param, gated and "linear_fc1" in name, name in _VOCABULARY, tied
                )
            )
    return out


def _global_name(local: str, numbers: dict[int, int]) -> str:
    return _LAYER.sub(lambda match: f"{match[1]}layers.{numbers[int(match[2])]}.", local)


def _layer_numbers(model: torch.nn.Module) -> dict[int, int]:
    """Index of a layer in this chunk to its zero-based number in the whole model."""
    decoder = getattr(model, "decoder", None)
    layers = getattr(decoder, "layers", ())
    return {index: layer.layer_number - 1 for index, layer in enumerate(layers)}


def full_tensor(named: NamedParam, local: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """The whole parameter-shaped tensor from this tensor-parallel rank's `local` part; a collective over the TP group.

    local: shape of the parameter on this rank, any dtype. vocab_size: rows to keep of embedding and output layer.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    param = named.param
    full = local
    if group.size() > 1 and getattr(param, "tensor_model_parallel", False):
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        axis = param.partition_dim
        if named.is_gated:
            halves = [part.chunk(2, dim=axis) for part in parts]
            full = torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim=axis)
        else:
            full = torch.cat(parts, dim=axis)
    if named.is_vocabulary and vocab_size is not None:
        full = full[:vocab_size]
    return full


def is_hashed_here(named: NamedParam, index: int, data_group: dist.ProcessGroup) -> bool:
    """Whether this rank hashes the full tensor of its parameter number `index`: ranks share the work.

    Data-parallel ranks have the same bits from a sum, tensor-parallel ranks those of a split parameter from a gather.
    What tensor-parallel ranks hold as copies of their own all of them hash: copies that differ must show.
    """
    if index % data_group.size() != data_group.rank():
        return False
    group = parallel_state.get_tensor_model_parallel_group()
    is_split = bool(getattr(named.param, "tensor_model_parallel", False))
    return not is_split or index // data_group.size() % group.size() == group.rank()
