"""Random number states: plain numbers and tensors in a checkpoint, put back into Python, numpy, torch and CUDA."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

RNG_KEY = "rng_state"


def rng_entry() -> ShardedObject:
    """Return this rank's states as megatron-core's entry: one for each (pipeline, tensor) rank, replicas are equal."""
    numpy_state = np.random.get_state(legacy=True)
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (numpy_state[0], numpy_state[1].tolist(), *map(int, numpy_state[2:4]), float(numpy_state[4])),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state(),
        "rng_tracker_states": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    return _entry([state])


def _entry(data: Any) -> ShardedObject:
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject(RNG_KEY, data, (pipeline, tensor), place, replica_id=replica)


def rng_key() -> str:
    """Return the key of this rank's states under the present layout."""
    return str(_entry(None).unique_key)


def set_rng(states: Any) -> None:
    """Put back what `rng_entry` holds, or what Megatron-LM saved.

    Raises ValueError for states of another kind.
    """
    try:
        state = states[0] if isinstance(states, list | tuple) else states
        version, numbers, gauss = state["random_rng_state"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = state["np_rng_state"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch_rng_state"])
        if torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["cuda_rng_state"])
        if state["rng_tracker_states"]:
            # A copy: the tracker changes what it is given, and a step may be computed again twice.
            tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["rng_tracker_states"]))
    except (KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"the random number states of the checkpoint cannot be used ({error}): load with --no-load-rng"
        ) from None
