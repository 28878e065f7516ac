"""What the server that forks the ranks of a pool imports once for all of them. It must start no thread."""

import importlib

import megatron.core.distributed  # noqa: F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
import megatron.core.optimizer  # noqa: F401

from megatron.training import cpu

for _name in cpu._MODULES:
    importlib.import_module(f"megatron.core.{_name}")
