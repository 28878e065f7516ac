"""`pretrain` run in this process on a tiny model, with what tests look at: losses, digest, state, gradients."""

import contextlib
import io
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deep_offload.optimizer.engine import STATE_NAMES
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from megatron.training.arguments import parse_args
from megatron.training.launch import find_ranks
from megatron.training.training import pretrain

LLAMA_LIKE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
GPT_LIKE = "--num-layers 4 --hidden-size 48 --num-attention-heads 4"  # biases, LayerNorm, learned positions, tied
COMMON = (
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 20 "
    "--lr 1e-3 "
    "--min-lr 1e-4 --weight-decay 0.1 --adam-beta2 0.95 --mock-data --tokenizer-type NullTokenizer --vocab-size 500 "
    "--log-interval 1 --deterministic-mode --eval-interval 1000 --eval-iters 0 --clip-grad 0.5 --attention-dropout 0 "
    "--hidden-dropout 0 --overlap-grad-reduce --ddp-bucket-size 20000 --log-state-digest --interleaved-offload "
    "--num-workers 0 --offload-cpu-threads 1 --offload-resident-fraction 0"
)
"""At least 4 buckets and 12 subgroups, boundaries inside parameters, clipping active."""


@dataclass
class LoopResult:
    losses: list[str] = field(default_factory=list)
    digest: str = ""
    skipped: list[str] = field(default_factory=list)
    text: str = ""
    traffic: dict[str, int] = field(default_factory=dict)
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def train(
    arguments: str,
    *,
    model: str = LLAMA_LIKE,
    before_step: Callable[[DeepOffloadOptimizer], None] | None = None,
    after_step: Callable[[DeepOffloadOptimizer, float], None] | None = None,
) -> LoopResult:
    """Train in this process; later flags win over earlier ones. The hooks see the optimizer around each step."""
    result, out = LoopResult(), io.StringIO()
    original_step, original_close = DeepOffloadOptimizer.step, DeepOffloadOptimizer.close

    def step(self):
        if before_step is not None:
            before_step(self)
        updated = original_step(self)
        if after_step is not None:
            after_step(self, updated[1])
        return updated

    def close(self):
        if not result.state:
            self.synchronize()
            result.traffic = self.traffic()
            result.state = param_states(self)
        original_close(self)

    DeepOffloadOptimizer.step, DeepOffloadOptimizer.close = step, close
    here = os.getcwd()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
            os.chdir(folder)  # a run with a planted NaN leaves its post-mortem there
            pretrain(parse_args(f"{model} {COMMON} {arguments}".split(), world_size=1), find_ranks(os.environ))
    finally:
        os.chdir(here)
        DeepOffloadOptimizer.step, DeepOffloadOptimizer.close = original_step, original_close
    result.text = out.getvalue()
    result.losses = re.findall(r"lm loss: (\S+)", result.text)
    result.skipped = re.findall(r"number of skipped iterations: +(\d+)", result.text)
    result.digest = re.findall(r"state digest: (\S+)", result.text)[0]
    return result


def param_states(optimizer: DeepOffloadOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter number -> weights and fp32 states, flat copies on the CPU."""
    out: dict = {}
    for number in range(len(optimizer._buffers.params)):
        out[number] = {"weight": optimizer._gather(number, None).flatten().clone()}
        for name in STATE_NAMES:
            out[number][name] = optimizer._gather(number, name).flatten().clone()
    return out


def pairwise(options: dict[str, Sequence]) -> list[dict]:
    """A small list of settings in which every pair of values of every two options occurs together."""
    names = list(options)
    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    rows = []
    while wanted:
        row: dict = {}
        for name in names:
            row[name] = max(
                options[name],
                key=lambda v, n=name: sum(
                    all(row.get(k, v if k == n else None) == w for k, w in pair) for pair in wanted if (n, v) in pair
                ),
            )
            if len(row) == 1:  # start from a pair that is still missing
                pair = min(wanted, key=str)
                row.update(dict(pair))
        covered = {p for p in wanted if all(row[k] == v for k, v in p)}
        if not covered:
            row = {n: row.get(n, options[n][0]) for n in names} | dict(min(wanted, key=str))
            covered = {p for p in wanted if all(row[k] == v for k, v in p)}
        wanted -= covered
        rows.append(row)
    return rows
