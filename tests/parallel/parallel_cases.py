"""The real `pretrain` in every rank of a pool, one command line after another, with what tests compare."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from megatron.training import training
from megatron.training.arguments import parse_args
from megatron.training.launch import Ranks
from megatron.training.training import pretrain

SHAPE = "--num-layers 4 --hidden-size 48 --num-attention-heads 4"
LLAMA = (
    f"{SHAPE} --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope"
)
"""Tied embeddings unless --untie-embeddings-and-output-weights is added."""
COMMON = (
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --train-iters 3 --lr 2e-3 --min-lr 1e-4 "
    "--lr-warmup-iters 1 --weight-decay 0.1 --adam-beta2 0.95 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 300 --make-vocab-size-divisible-by 8 --log-interval 1 --deterministic-mode --eval-interval 1000 "
    "--eval-iters 0 --clip-grad 0.5 --attention-dropout 0 --hidden-dropout 0 --ddp-bucket-size 9000 --log-state-digest "
    "--interleaved-offload --offload-resident-fraction 0 --offload-subgroup-numel 1500 --num-workers 0 "
    "--offload-cpu-threads 1"
)
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 virtual": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "dp2": (2, ""),
    "dp4": (4, ""),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2"),
    "tp2 sp pp2 virtual": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "pp2 virtual dp2": (4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2 pp2 dp2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
"""Name -> (ranks, flags)."""


@dataclass
class Outcome:
    """What one rank saw of one run. Losses are on the last rank, the digest on the first."""

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    """Every bit of each step's gradient norm."""
    scales: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    digest: str = ""
    num_buckets: int = 0
    num_subgroups: int = 0
    early: int = 0
    """Subgroups whose gradient was said to be final before the optimizer's step, in the last iteration."""
    replicas_agree: bool = True
    traffic: dict[str, int] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


Watch = Callable[[Outcome], contextlib.AbstractContextManager]


def free_ports(count: int) -> list[int]:
    """Ports on this host that nobody listens on now, below those that the system gives to sockets by itself."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
    return found


def run_all(command_lines: Sequence[str], cache: str, watch: Watch | None = None) -> list[Outcome]:
    """In a rank of a pool: train each command line. cache: folder for the machine's measured rates.

    The pool's process group is left: each run makes its own. watch: a context around each run.
    """
    os.environ["DEEP_OFFLOAD_CACHE"] = cache
    rank, world = dist.get_rank(), dist.get_world_size()
    ports = free_ports(len(command_lines))
    dist.broadcast_object_list(ports, src=0)
    dist.barrier()
    dist.destroy_process_group()
    places = [Ranks(rank, world, rank, world, "127.0.0.1", port, "torchrun") for port in ports]
    return [train(line, place, watch) for line, place in zip(command_lines, places)]


def train(command_line: str, ranks: Ranks, watch: Watch | None = None) -> Outcome:
    """Train in this rank as torchrun would start it."""
    outcome, out = Outcome(), io.StringIO()
    config = parse_args(command_line.split(), world_size=ranks.world_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(_observed(outcome))
        # A process beside each rank, which has tests of its own and would cost as much time as a run here.
        stack.enter_context(mock.patch.object(training, "MemoryWatch", mock.Mock()))
        # A pool ends all ranks of a case that fails: why it failed must not wait for lanes that never end.
        stack.enter_context(mock.patch.object(training, "_clean_up_failure", mock.Mock()))
        if watch is not None:
            stack.enter_context(watch(outcome))
        pretrain(config, ranks)
    text = out.getvalue()
    outcome.losses = re.findall(r"lm loss: (\S+)", text)
    outcome.scales = re.findall(r"loss scale: (\S+)", text)
    outcome.skipped = re.findall(r"number of skipped iterations: +(\d+)", text)
    outcome.digest = "".join(re.findall(r"state digest: (\S+)", text))
    return outcome


@contextlib.contextmanager
def _observed(outcome: Outcome):
    """Look at the optimizer around its steps and before it closes."""
    original_step, original_close = DeepOffloadOptimizer.step, DeepOffloadOptimizer.close
    seen = []

    def step(self):
        outcome.early = len(self._engine._ready)
        result = original_step(self)
        outcome.norms.append(float(result[1]).hex())
        return result

    def close(self):
        if not seen:
            seen.append(self)
            self.synchronize()
            outcome.num_buckets = len(self._buffers.shards)
            outcome.num_subgroups = len(self._engine.layout.subgroups)
            outcome.traffic = self.traffic()
            outcome.replicas_agree = replicas_agree(self)
        original_close(self)

    with (
        mock.patch.object(DeepOffloadOptimizer, "step", step),
        mock.patch.object(DeepOffloadOptimizer, "close", close),
    ):
        yield


def replicas_agree(optimizer: DeepOffloadOptimizer) -> bool:
    """Whether each parameter has the same bits on all ranks that hold it, once gathered; and names are unique."""
    for chunk in optimizer._chunks:
        chunk.start_param_sync(force_sync=True)
    agree = True
    group = optimizer._buffers.shards[0].group
    for param in optimizer._buffers.params:
        mine = param.detach().contiguous().view(torch.uint8).flatten()
        first = mine.clone()
        dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
        agree = agree and torch.equal(first, mine)
    names = [(entry.name, entry.kind) for entry in optimizer.state_entries()]
    return agree and len(names) == len(set(names))
