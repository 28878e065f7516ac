"""What checkpoint tests run on ranks: small GPTs that train, save and load. Functions are importable by a rank pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.training import model
from megatron.training.arguments import build_config
from megatron.training.checkpointing import Checkpoints
from megatron.training.data import check_data, tokenizer_of
from megatron.training.initialize import set_seeds
from megatron.training.launch import Ranks
from megatron.training.schedule import build_scheduler
from megatron.training.train_step import connect
from megatron.training.trainer import Trainer
from megatron.training.training import _build_data, _build_optimizer
from tests.rank_pool import use_layout

VOCAB = 500

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --train-iters 20 --bf16 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --make-vocab-size-divisible-by 8 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1 --deterministic-mode --num-workers 0"
)

OFFLOAD = "--interleaved-offload --offload-resident-fraction 0"


def words(*parts: str) -> list[str]:
    """Split flags given as text; the last of a repeated flag counts."""
    return " ".join(parts).split()


class Run:
    """A trainer of this rank with all that belongs to it. `lines` are what it printed here."""

    def __init__(self, argv: Sequence[str], edit: Callable[[torch.nn.Module], None] | None = None) -> None:
        """argv: flags of pretrain_gpt.py; --save and --load work. edit: changes a model chunk before DDP wraps it."""
        self.lines: list[str] = []
        config = build_config(argv, world_size=dist.get_world_size())
        tokenizer = tokenizer_of(config.data)
        self.config = config = config.with_vocab(tokenizer.vocab_size)
        parallel = config.parallel
        use_layout(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
        )
        set_seeds(config.lifecycle.seed)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with mock.patch.object(model, "build_chunk", _edited(model.build_chunk, edit)):
            chunks = model.build_model(config, device)
        self.optimizer = _build_optimizer(config, chunks, self.lines.append)
        connect(chunks, self.optimizer)
        scheduler = build_scheduler(config, self.optimizer)
        rank = dist.get_rank()
        ranks = Ranks(rank, dist.get_world_size(), rank, dist.get_world_size(), "127.0.0.1", 0, "torchrun")
        self.checkpoints = Checkpoints(config.checkpoint, self.lines.append, VOCAB)
        source = check_data(config)
        self.trainer = Trainer(
            config, ranks, device, chunks, self.optimizer, scheduler, self.checkpoints, self.lines.append
        )
        self.trainer.use(_build_data(config, source, tokenizer, chunks, self.lines.append), source)

    def train(self) -> None:
        """Run the loop to its end."""
        self.trainer.train()

    def entries(self) -> dict[tuple[str, str], str]:
        """Return the hash of every full, unpadded tensor by (parameter, kind), from all ranks."""
        return {(e.name, e.kind): e.sha256 for e in self.optimizer.state_entries(VOCAB)}

    def close(self) -> None:
        """Release host memory and threads."""
        self.trainer.close()
        self.optimizer.close()


def _edited(build: Callable[..., Any], edit: Callable[[torch.nn.Module], None] | None) -> Callable[..., Any]:
    def build_and_edit(*args: Any, **options: Any) -> Any:
        chunk = build(*args, **options)
        if edit is not None:
            edit(chunk)
        return chunk

    return build_and_edit


def losses(lines: Sequence[str]) -> list[str]:
    """Return `lm loss` and `grad norm` of each log line, as printed."""
    out = []
    for line in lines:
        if "lm loss:" in line and "iteration" in line:
            fields = dict(
                part.split(":", 1) for part in line.split("|") if ":" in part and "lm" in part or "norm" in part
            )
            out.append(" ".join(f"{k.strip()}={v.strip()}" for k, v in sorted(fields.items())))
    return out


def train(argv: Sequence[str]) -> dict[str, Any]:
    """Train as the flags say; returns log lines, hashes of the state, digest."""
    run = Run(argv)
    try:
        run.train()
        return _result(run)
    finally:
        run.close()


def load(argv: Sequence[str]) -> dict[str, Any]:
    """Load as the flags say and train nothing."""
    run = Run(argv)
    try:
        return _result(run)
    finally:
        run.close()


def _result(run: Run) -> dict[str, Any]:
    return {
        "lines": run.lines,
        "losses": losses(run.lines),
        "entries": run.entries(),
        "digest": run.optimizer.state_digest(VOCAB),
        "iteration": run.trainer.state.iteration,
        "samples": run.trainer.state.consumed_train_samples,
        "step": run.optimizer.num_steps,
        "rates": [g["lr"] for g in run.optimizer.param_groups],
        "decays": [g["weight_decay"] for g in run.optimizer.param_groups],
    }
