"""Checkpoints that Megatron-LM wrote in its other formats: state by buckets, and the old torch files.

Both depend on the layout of the run that saved, so they load under the same layout only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from deep_offload.optimizer.checkpoint import CHECKPOINT_KEYS
from deep_offload.optimizer.checkpoint_state import STATE_KINDS, WEIGHT, OwnRange, ParamState
from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import CheckpointReader, flat_values
from megatron.training.checkpointing_safety import load_checked

_FUSED_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def check_format(folder: Path) -> str:
    """Return `torch_dist` or `torch`. Raises ValueError, one sentence, for any other format."""
    path = folder / layout.CONFIG
    if not path.exists():
        if any(folder.glob("mp_rank_*")):
            return "torch"
        raise ValueError(f"{folder} has no {layout.CONFIG} and no mp_rank_* folder: it is no checkpoint of Megatron")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        backend = values["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): load another checkpoint with --ckpt-step") from None
    if backend != "torch_dist":
        raise ValueError(
            f"{folder} has the format {backend!r}, which is not read here: load it with Megatron-LM and save it with "
            "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
        )
    for part in ("sharded", "common"):
        number = values.get(f"{part}_backend_version", 1)
        if number != 1:
            raise ValueError(
                f"{folder} has version {number} of megatron-core's {part} format ({path.name}), version 1 is read "
                "here: save it with megatron-core 0.16"
            )
    return "torch_dist"


# -- state by buckets -------------------------------------------------------------------------------------------------


def _bucket_prefix() -> str:
    rank = torch.distributed.get_rank(parallel_state.get_model_parallel_group())
    return f"optimizer.distributed.dp_group_idx_{rank}"


def has_bucket_state(reader: CheckpointReader) -> bool:
    """Whether optimizer state is there as Megatron's default, dp_reshardable, writes it."""
    return any(key.startswith("optimizer.distributed.") for key in reader.tensors())


def load_bucket_state(reader: CheckpointReader, params: ParamState) -> tuple[int, dict[str, Any] | None]:
    """Masters and moments from buckets; returns the steps of the optimizer and the loss scaler's numbers.

    Raises ValueError unless the tensor and pipeline parallel sizes and the buckets are those of the run that saved.
    """
    advice = (
        "its optimizer state is tied to the layout it was saved with (dp_reshardable): use the same tensor and "
        "pipeline parallel sizes and bucket size, or save it in Megatron-LM with --dist-ckpt-optim-fully-reshardable, "
        "or add --no-load-optim"
    )
    prefix = _bucket_prefix()
    groups = {key.rsplit(".gbuf_idx_", 1)[0] for key in reader.tensors() if key.startswith("optimizer.distributed.")}
    size = parallel_state.get_model_parallel_group().size()
    if len(groups) != size:
        raise ValueError(
            f"{reader.folder} was saved by {len(groups)} model parallel ranks, this run has {size}; {advice}"
        )
    for where in params.ranges():
        for kind in STATE_KINDS:
            key = _bucket_key(prefix, where, kind)
            found, wanted = reader.shape(key), (where.bucket.numel,)
            if found != wanted:
                raise ValueError(f"{reader.folder} has {key} of shape {found}, this run needs {wanted}; {advice}")
            count = where.end - where.start
            values = flat_values(reader, key, (where.bucket_start,), (count,), torch.zeros(count))
            params.write(where, kind, where.start, values)
    saved = reader.read_object(f"{prefix}.optimizer/shard_0_1")
    steps = [int(group["step"]) for group in saved["param_groups"] if group.get("step") is not None]
    scaler = f"{prefix}.grad_scaler/shard_0_1"
    return max(steps, default=0), reader.read_object(scaler) if scaler in reader.objects() else None


def _bucket_key(prefix: str, where: OwnRange, kind: str) -> str:
    bucket = where.bucket
    name = f"{prefix}.gbuf_idx_{bucket.buffer}.dtype_{bucket.dtypes}.bucket_idx_{bucket.index}"
    return f"{name}.{CHECKPOINT_KEYS[kind]}"


# -- old torch files --------------------------------------------------------------------------------------------------


def read_torch_files(folder: Path) -> dict[str, Any]:
    """Return this rank's model_optim_rng.pt. Raises ValueError for another layout and for a dangerous file."""
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pipeline > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    there = len(list(folder.glob("mp_rank_*")))
    path = folder / name / "model_optim_rng.pt"
    if there != tensor * pipeline or not path.exists():
        raise ValueError(
            f"{folder} was saved by {there} model parallel ranks and this run has {tensor * pipeline} (tensor "
            f"{tensor} x pipeline {pipeline}): Megatron's old torch format loads under the same sizes only, so use "
            "them and save anew"
        )
    return dict(load_checked(path, str(path)))


@torch.no_grad()
def load_torch_weights(files: dict[str, Any], chunks: list[DistributedDataParallel], params: ParamState) -> None:
    """Weights of this rank from its old file; masters take the file's precision, moments become zero."""
    values: dict[int, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        saved = files.get("model" if len(chunks) == 1 else f"model{number}")
        if not isinstance(saved, dict) or not any(isinstance(v, torch.Tensor) for v in saved.values()):
            raise ValueError(
                "the checkpoint is from before Megatron's model was in megatron-core (it has no flat `model`): convert "
                "it with the Megatron-LM of its time"
            )
        trained = {id(param) for param in params.params}
        for name, own in _named_tensors(chunk):
            tensor = saved.get(name, saved.get(_fused_name(name)))
            if tensor is None or tensor.shape != own.shape:
                shape = None if tensor is None else tuple(tensor.shape)
                raise ValueError(
                    f"the checkpoint has {name} of shape {shape}, this model's is {tuple(own.shape)}: give the "
                    "model's shape as it was saved"
                )
            if id(own) in trained:
                values[id(own)] = tensor.reshape(-1)
            else:
                own.copy_(tensor)
    for where in params.ranges():
        flat = values[id(params.params[where.number])]
        params.write(where, WEIGHT, where.start, flat[where.start : where.end])
    params.clear_moments()


def _named_tensors(chunk: DistributedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    model = unwrap_model(chunk)
    yield from model.named_parameters()
    persistent = set(model.state_dict())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _fused_name(name: str) -> str:
    for local, fused in _FUSED_NAMES.items():
        name = name.replace(local, fused)
    return name
