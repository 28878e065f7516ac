"""Let megatron-core run where there is no GPU. Nothing in torch itself is touched.

megatron-core asks for the current CUDA device in many small places. Each module listed here gets its own global
named `torch`: a view of the real one in which the current device is the CPU, waiting for the device does nothing,
and the random numbers of "the GPU" are the CPU's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")

# Modules whose CUDA calls are reached by training or checkpointing, found by tracing runs of every parallel layout.
_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "timers",
    "transformer.utils",
    "utils",
)
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


class _View(ModuleType):
    """A module seen through replacements: names that are not replaced come from the original."""

    def __init__(self, original: ModuleType, **replacements: object) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(replacements)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _IdleStream:
    """Stands for a CUDA stream: all work on the CPU is done when a call returns."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_event(self, event: object) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: object) -> None:
        """Nothing is pending."""


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory` with device="cuda" understood as the CPU."""

    def make(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = _CPU
        return factory(*args, **options)

    return make


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _do_nothing(*args: object, **options: object) -> None:
    return None


def _build_view() -> _View:
    cuda = _View(
        torch.cuda,
        current_device=lambda: _CPU,
        current_stream=lambda *args: _IdleStream(),
        default_stream=lambda *args: _IdleStream(),
        empty_cache=_do_nothing,
        get_rng_state=_get_rng_state,
        manual_seed=torch.manual_seed,
        random=_View(torch.cuda.random, get_rng_state=_get_rng_state),
        synchronize=_do_nothing,
    )
    return _View(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def enable() -> None:
    """Give megatron-core's modules their view of torch. Call once, before a model is built, and never with a GPU."""
    view = _build_view()
    for name in _MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = view
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # "The GPU's" generator is the CPU's one, so the CPU's own must seem to stand still: the tracker warns when it
    # moves inside a fork, and recomputation would restore it a second time.
    still = torch.get_rng_state()
    rng.torch = _View(view, get_rng_state=lambda: still, set_rng_state=_do_nothing)
    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
