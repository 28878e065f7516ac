"""In a rank, on the CPU or its GPU: a small model under FSDP2's fully_shard, trained with InterleavedAdamW."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deep_offload.config import OffloadConfig
from deep_offload.optimizer.torch import InterleavedAdamW
from tests.parallel.parallel_cases import free_ports

STEPS = 6
CLIP = 0.3


def make_model(dtype: torch.dtype) -> torch.nn.Sequential:
    """Layers whose rows divide by 2 and layers whose rows do not."""
    torch.manual_seed(5)
    sizes = (24, 40, 33, 17)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (torch.nn.Linear(a, b), torch.nn.LayerNorm(b))]
    return torch.nn.Sequential(*layers).to(dtype)


def device_of(rank: int) -> torch.device:
    """The rank's GPU, if there is one for each rank."""
    enough = torch.cuda.device_count() >= dist.get_world_size()
    return torch.device("cuda", rank) if enough else torch.device("cpu")


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Another one on each rank."""
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def settings(**options) -> OffloadConfig:
    """Several subgroups, borders inside parameters."""
    return OffloadConfig(
        interleaved_offload=True, offload_subgroup_numel=200, offload_cpu_threads=1, offload_num_slots=2, **options
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[float]:
    """STEPS steps on this rank's batches; returns the norms before clipping."""
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rank = dist.get_rank()
        loss = model(batch(step, rank, dtype).to(device_of(rank))).float().square().mean() * 10
        loss.backward()
        if isinstance(optimizer, InterleavedAdamW):
            optimizer.step()
            norms.append(optimizer.last_grad_norm)
        else:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            norms.append(float(total.full_tensor()))
            optimizer.step()
    return norms


def use_nccl(device: torch.device) -> None:
    """Leave the pool's group for one of NCCL over the same ranks; kernels are reproducible from here on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ports = free_ports(1)
    dist.broadcast_object_list(ports, src=0)
    dist.barrier()
    dist.destroy_process_group()
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    address = f"tcp://127.0.0.1:{ports[0]}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world, device_id=device)


def run(cache: str, dtype_name: str, placements: list[dict]) -> dict:
    """Train the same model for each placement, and with torch's AdamW: full weights, states and norms of each."""
    os.environ["DEEP_OFFLOAD_CACHE"] = cache
    dtype = getattr(torch, dtype_name)
    device = device_of(dist.get_rank())
    if device.type == "cuda":
        use_nccl(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    start = make_model(dtype).to(device)
    groups = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    results = {}
    for number in range(len(placements) + 1):
        model = copy.deepcopy(start)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if number == len(placements):
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **groups)
        else:
            offload = settings(**placements[number])
            optimizer = InterleavedAdamW(model.parameters(), offload=offload, max_grad_norm=CLIP, **groups)
        norms = train(model, optimizer, dtype)
        weights = [p.full_tensor().detach().cpu() for p in model.parameters()]
        states = {}
        if isinstance(optimizer, InterleavedAdamW):
            states = optimizer.state_dict()["state"]
            states["traffic"] = optimizer.traffic
            optimizer.close()
        results[number] = (weights, states, norms)
    return results


def own_parts(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's parts of all weights."""
    return [p.to_local().detach().clone() for p in model.parameters()]


def fill_own_parts(model: torch.nn.Module, parts: Sequence[torch.Tensor]) -> None:
    """Overwrite this rank's parts of all weights."""
    with torch.no_grad():
        for p, part in zip(model.parameters(), parts, strict=True):
            p.to_local().copy_(part)


def loads(cache: str, dtype_name: str) -> dict[str, bool]:
    """Whether weights that are loaded into sharded parameters stay, by way of loading; see `test_loaded_weights`."""
    os.environ["DEEP_OFFLOAD_CACHE"] = cache
    dtype, rank = getattr(torch, dtype_name), dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build(kind: type, **options: Any) -> tuple[torch.nn.Module, Any]:
        model = make_model(dtype)
        fully_shard(model, mesh=mesh)
        return model, kind(model.parameters(), lr=1e-2, weight_decay=0.0, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(number, rank, dtype)).float().square().mean().backward()
        optimizer.step()

    def fresh() -> tuple[torch.nn.Module, Any]:
        return build(InterleavedAdamW, offload=settings(offload_resident_fraction=0.0, offload_gpu_share=0.5))

    def holds(model: torch.nn.Module, optimizer: Any, wanted: Sequence[torch.Tensor]) -> bool:
        """A step that changes nothing leaves the wanted weights, now and after it."""
        before = all(torch.equal(a, b) for a, b in zip(own_parts(model), wanted, strict=True))
        optimizer.param_groups[0]["lr"] = 0.0
        step(model, optimizer, 9)
        after = all(torch.equal(a, b) for a, b in zip(own_parts(model), wanted, strict=True))
        optimizer.close()
        return before and after

    torch_model, torch_optimizer = build(torch.optim.AdamW, foreach=False)
    step(torch_model, torch_optimizer, 0)
    model, optimizer = fresh()
    step(model, optimizer, 0)
    state, weights = optimizer.state_dict(), own_parts(model)
    half = [torch.full_like(part, 0.5) for part in weights]
    found = {}
    for name in ("torch's state behind weights", "masters refreshed", "own state alone", "own state behind weights"):
        other, resumed = fresh()
        if "behind" in name or name == "masters refreshed":
            fill_own_parts(other, half if name != "own state behind weights" else weights)
        if name == "masters refreshed":
            resumed.refresh_masters()
        else:
            resumed.load_state_dict(torch_optimizer.state_dict() if name.startswith("torch") else state)
        found[name] = holds(other, resumed, weights if name.startswith("own") else half)
    optimizer.close()
    return found


def refused(cache: str) -> str:
    """A mesh of two dimensions is refused in one sentence."""
    os.environ["DEEP_OFFLOAD_CACHE"] = cache
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    model = make_model(torch.float32)
    fully_shard(model, mesh=mesh)
    try:
        InterleavedAdamW(model.parameters(), offload=settings())
    except ValueError as error:
        return str(error)
    return ""


def assert_resident_bits(resident: tuple[Any, Any, Any], others: Sequence[tuple[Any, Any, Any]]) -> None:
    """Weights, states and norms of offloaded placements are those of the resident run, and the CPU updated a part."""
    weights, states, norms = resident
    for got_weights, got_states, got_norms in others:
        assert got_norms == norms
        assert all(torch.equal(a, b) for a, b in zip(got_weights, weights, strict=True))
        assert got_states.pop("traffic")["cpu_params"] > 0
        for index, state in got_states.items():
            for name, tensor in state.items():
                assert torch.equal(tensor, states[index][name]), f"{name} of {index}"
