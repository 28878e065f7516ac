"""megatron-core's own distributed optimizer on a rank without a GPU, with state of known numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from megatron.training import cpu, model
from megatron.training.arguments import build_config
from megatron.training.data import tokenizer_of
from megatron.training.initialize import set_seeds
from megatron.training.training import optimizer_config
from tests.rank_pool import use_layout

KINDS = ("param", "exp_avg", "exp_avg_sq")


@contextmanager
def cuda_named_types() -> Iterator[None]:
    """megatron-core's optimizer asks for the names of CUDA's tensor types and knows no others."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: object, **options: object) -> object:
        result = original(self, *args, **options)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) and not self.is_cuda else result

    view = distrib_optimizer.torch if torch.cuda.is_available() else cpu._build_view()
    with mock.patch.object(torch.Tensor, "type", named), mock.patch.object(distrib_optimizer, "torch", view):
        if torch.cuda.is_available():
            yield
            return
        with mock.patch.object(torch.Tensor, "cuda", lambda self, *args, **options: self):
            yield


def build(argv: Sequence[str]) -> tuple[list[DistributedDataParallel], DistributedOptimizer]:
    """Return model chunks and megatron-core's optimizer for flags of pretrain_gpt.py, after one step of zeros."""
    import torch.distributed as dist

    config = build_config(argv, world_size=dist.get_world_size())
    config = config.with_vocab(tokenizer_of(config.data).vocab_size)
    parallel = config.parallel
    use_layout(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
    )
    set_seeds(config.lifecycle.seed)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    chunks = model.build_model(config, device)
    chained = get_megatron_optimizer(optimizer_config(config), chunks, use_gloo_process_groups=False)
    optimizer = chained.chained_optimizers[0] if hasattr(chained, "chained_optimizers") else chained
    assert isinstance(optimizer, DistributedOptimizer)
    optimizer._init_optimizer_states_with_dummy_values()
    return chunks, optimizer


def number(key: str, kind: str, shape: Sequence[int]) -> torch.Tensor:
    """Return what a state of the tensor of this key holds everywhere: fp32, from the names alone, moments positive."""
    seed = int.from_bytes(hashlib.sha256(f"{key} {kind}".encode()).digest()[:6], "big")
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return values.abs() if kind == "exp_avg_sq" else values


def model_state(chunks: Sequence[DistributedDataParallel]) -> dict:
    """Return megatron-core's sharded state of the chunks."""
    return {
        "model" if len(chunks) == 1 else f"model{i}": unwrap_model(c).sharded_state_dict(metadata={})
        for i, c in enumerate(chunks)
    }


def save(argv: Sequence[str], folder: str, sharding: str) -> None:
    """Fill megatron-core's optimizer with known numbers and let megatron-core save it."""
    with cuda_named_types():
        chunks, optimizer = build(argv)
        _fill(chunks, optimizer)
        state = model_state(chunks)
        metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
        sharded = {**state, "iteration": 7, "optimizer": optimizer.sharded_state_dict(state, metadata=dict(metadata))}
        sharded["content_metadata"] = metadata
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(sharded, folder)
        if torch.distributed.get_rank() == 0:
            (Path(folder).parent / "latest_checkpointed_iteration.txt").write_text("7")


def _ranges(chunks: Sequence[DistributedDataParallel], optimizer: DistributedOptimizer) -> Iterator[tuple]:
    """Yield (area of the checkpoint's tensors, flat range of it that this rank owns, parameter)."""
    from deep_offload.optimizer.checkpoint_state import areas_of_params

    params = [p for chunk in chunks for p in chunk.parameters()]
    for param, areas in zip(params, areas_of_params(model_state(chunks), params), strict=True):
        if param not in optimizer.model_param_group_index_map:
            continue
        own = optimizer._get_model_param_range_map(param)["param"]
        for area in areas:
            for box in area.part(own.start, own.end):
                yield param, box, box.flat_start - own.start


def _fill(chunks: Sequence[DistributedDataParallel], optimizer: DistributedOptimizer) -> None:
    for param, box, start in _ranges(chunks, optimizer):
        tensors = optimizer._get_main_param_and_optimizer_states(param)
        where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape))
        for kind in KINDS:
            values = number(box.key, kind, box.global_shape)[where].reshape(-1)
            tensors[kind].data[start : start + box.numel].copy_(values)
    for state in optimizer.optimizer.state.values():
        state["step"].fill_(7)


@contextmanager
def _step_of_torch_adam() -> Iterator[None]:
    """With torch's Adam megatron-core 0.16.1 looks for a `step` that it has itself left out of the tensors."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: DistributedOptimizer, param: torch.nn.Parameter, tensors: dict) -> None:
        kept = self._get_main_param_and_optimizer_states(param)["step"].clone()
        original(self, param, {"step": kept, **tensors})

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        yield


def load(argv: Sequence[str], folder: str) -> list[tuple]:
    """Let megatron-core load a checkpoint; returns (key, kind, offset, flat start, values) of this rank's state."""
    with cuda_named_types():
        chunks, optimizer = build(argv)
        state = model_state(chunks)
        metadata = dist_checkpointing.load_content_metadata(folder)
        sharded = {**state, "optimizer": optimizer.sharded_state_dict(state, is_loading=True, metadata=dict(metadata))}
        loaded = dist_checkpointing.load(sharded, folder)
        with _step_of_torch_adam():
            optimizer.load_state_dict(loaded["optimizer"])
        for i, chunk in enumerate(chunks):
            name = "model" if len(chunks) == 1 else f"model{i}"
            unwrap_model(chunk).load_state_dict(loaded[name], strict=True)
        out = []
        for param, box, start in _ranges(chunks, optimizer):
            tensors = optimizer._get_main_param_and_optimizer_states(param)
            for kind in KINDS:
                values = tensors[kind].detach()[start : start + box.numel].clone()
                out.append((box.key, kind, box.offset, box.shape, values))
            assert int(tensors["step"]) == loaded["optimizer"]["optimizer"]["param_groups"][0]["step"]
        weights = {key: value for key, value in unwrap_model(chunks[0]).state_dict().items() if value is not None}
        assert weights and parallel_state.model_parallel_is_initialized()
        return out
