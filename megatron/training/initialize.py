"""Start and end of a distributed process: device, process groups, random numbers, reproducible kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.training import cpu
from megatron.training.config import TrainingConfig
from megatron.training.device import SystemGpus, choose_device, find_system_gpus, find_torch_cuda
from megatron.training.launch import Ranks
from megatron.training.rendezvous import connect

_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE_CUBLAS = (":4096:8", ":16:8")


def initialize(config: TrainingConfig, ranks: Ranks, report: Callable[[str], None]) -> torch.device:
    """Make this process a member of the job and return its device.

    Sets up torch.distributed, megatron-core's process groups and every random number generator. On a machine
    without a GPU megatron-core is taught to live on the CPU (see cpu.py). report: prints a line while ranks are
    missing. Raises ValueError for a device that cannot be used, RuntimeError for ranks that never come.
    """
    if config.lifecycle.deterministic_mode:
        set_deterministic()
    device = torch.device("cpu")
    if not config.lifecycle.use_cpu:  # or looking would already start CUDA
        cuda = find_torch_cuda(ranks.local_rank)
        # Only where torch sees none does it matter what the system has, and nvidia-smi takes a second or more.
        system = SystemGpus() if cuda.num_gpus else find_system_gpus()
        device = choose_device(ranks.local_rank, ranks.source == "slurm", system, cuda)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cpu.enable()
    _join(config, ranks, device, report)
    set_seeds(config.lifecycle.seed)
    return device


def set_deterministic() -> None:
    """Let torch use reproducible kernels only. Must run before CUDA starts, which reads cuBLAS's variable once."""
    value = os.environ.get(_CUBLAS_VARIABLE)
    if value is None:
        if torch.cuda.is_initialized():
            raise ValueError(
                f"--deterministic-mode needs {_CUBLAS_VARIABLE} before CUDA starts, and CUDA has started: "
                f"export {_CUBLAS_VARIABLE}=:4096:8"
            )
        os.environ[_CUBLAS_VARIABLE] = ":4096:8"
    elif value not in _REPRODUCIBLE_CUBLAS:
        raise ValueError(
            f"{_CUBLAS_VARIABLE} is {value}, --deterministic-mode allows {' and '.join(_REPRODUCIBLE_CUBLAS)}: unset it"
        )
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # TransformerEngine's own switch
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that it has not written; filling every new tensor would only cost bandwidth.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _join(config: TrainingConfig, ranks: Ranks, device: torch.device, report: Callable[[str], None]) -> None:
    parallel = config.parallel
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    backend = parallel.distributed_backend if device.type == "cuda" else "gloo"
    store = connect(ranks, timeout, report)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        # Makes a communicator for each group at once. One rank has some twenty groups and needs four of them.
        device_id=device if backend == "nccl" and ranks.world_size > 1 else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    if backend == "nccl" and ranks.world_size == 1:
        _start_communicators(device)


def _start_communicators(device: torch.device) -> None:
    """Let the groups that a single rank communicates in take their memory, which torch's allocator does not count.

    That is 0.4 GB of an H200 each, and state is placed by what is free before the first step.
    """
    for group in (
        dist.group.WORLD,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def set_seeds(seed: int) -> None:
    """Seed Python, numpy, torch and the model-parallel generators; each pipeline stage has its own sequence."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def shut_down() -> None:
    """Leave all process groups. Safe to call when nothing was set up."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
