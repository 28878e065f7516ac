"""`pretrain`: from settings to a finished run. The loop itself is in trainer.py."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_attr_wrapped_model

from deep_offload.optimizer.factory import build_optimizer
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.ranks import from_all_ranks
from megatron.training.checkpointing import Checkpoints
from megatron.training.config import TrainingConfig
from megatron.training.data import DataSource, TrainingData, check_data, print_datasets, tokenizer_of
from megatron.training.device import describe_device
from megatron.training.dry_run import estimated_bytes, run_shape
from megatron.training.exit_codes import FINISHED
from megatron.training.initialize import initialize, shut_down
from megatron.training.launch import Ranks
from megatron.training.lifecycle import end_process_after
from megatron.training.memory_watch import MemoryWatch
from megatron.training.metrics import datetime_line, flat_settings, gibibytes
from megatron.training.model import TORCH_DTYPES, build_model
from megatron.training.outputs import check_outputs
from megatron.training.postmortem import PostMortem
from megatron.training.run_record import write_trace
from megatron.training.schedule import build_scheduler
from megatron.training.side_files import SideFiles
from megatron.training.tokenizer import Tokenizer
from megatron.training.train_step import connect
from megatron.training.trainer import Checkpointing, Trainer

_SECONDS_TO_FAIL = 30.0


def pretrain(config: TrainingConfig, ranks: Ranks, checkpointing: Checkpointing | None = None) -> int:
    """Train a GPT as `config` says on this process, which is `ranks` of the job; returns the exit code, 0, 16 or 17.

    checkpointing: saves and restores; None does what --save and --load say. Raises ValueError, one sentence, for
    settings and data that cannot work, before anything large is allocated, and RuntimeError for faults of the run.
    """
    report_first = _report if ranks.is_first else _ignore
    tokenizer = tokenizer_of(config.data)
    checkpointing = checkpointing or Checkpoints(config.checkpoint, _report, _vocabulary_rows(config, tokenizer))
    config = config.with_vocab(tokenizer.vocab_size)
    source = check_data(config)
    _print_arguments(config, report_first)
    optimizer: DeepOffloadOptimizer | None = None
    postmortem, watch = PostMortem(config, ranks.rank), None
    try:
        device = initialize(config, ranks, _report)
        check_outputs(config, ranks)
        report_first(describe_device(device, ranks.world_size))
        report_first(datetime_line("after megatron is initialized"))
        chunks = build_model(config, device)
        _print_parameters(chunks)
        optimizer = _build_optimizer(config, chunks, report_first)
        connect(chunks, optimizer)
        scheduler = build_scheduler(config, optimizer)
        report_first(datetime_line("after model, optimizer, and learning rate scheduler are built"))
        postmortem.plan(optimizer.memory_bytes)
        save = config.checkpoint.save
        watch = MemoryWatch(ranks.rank, optimizer.memory_bytes()[0], None if save is None else Path(save))
        report = postmortem.keep(_report)
        trainer = Trainer(config, ranks, device, chunks, optimizer, scheduler, checkpointing, report, postmortem)
        try:
            trainer.use(_build_data(config, source, tokenizer, chunks, report_first), source)
            _print_notes([*config.notes, *source.notes], report_first)
            _run(trainer, tokenizer, report_first)
        finally:
            trainer.close()
    except BaseException as error:
        if isinstance(checkpointing, Checkpoints):
            checkpointing.fail(error)
            _say_what_is_known(postmortem, error, checkpointing.iteration, ranks)
        if watch is not None:
            watch.close()
        _clean_up_failure(optimizer, ranks)
        raise
    watch.close()
    optimizer.close()
    shut_down()
    return FINISHED if trainer.verdict is None else trainer.verdict.code


def _vocabulary_rows(config: TrainingConfig, tokenizer: Tokenizer) -> int:
    """Return the rows of the vocabulary that are no padding: a converted model may have more than its tokenizer."""
    return config.data.unpadded_vocab_size or tokenizer.vocab_size


def _run(trainer: Trainer, tokenizer: Tokenizer, report_first: Callable[[str], None]) -> None:
    if not trainer.config.lifecycle.skip_train and trainer.config.num_iterations:
        report_first("training ...")
        report_first(datetime_line("before the start of training step"))
        trainer.train()
    trainer.finish()
    trainer.optimizer.synchronize()
    _print_traffic(trainer.optimizer.traffic(), report_first)
    _print_memory(trainer.optimizer, trainer.device, report_first)
    trainer.end_record()
    _write_trace(trainer.optimizer, trainer.config.offload.offload_trace, report_first)
    if trainer.config.offload.log_state_digest:
        digest = trainer.optimizer.state_digest(vocab_size=_vocabulary_rows(trainer.config, tokenizer))
        report_first(f"state digest: {digest}")


def _build_optimizer(
    config: TrainingConfig, chunks: list[DistributedDataParallel], report_first: Callable[[str], None]
) -> DeepOffloadOptimizer:
    optimizer = build_optimizer(
        chunks,
        optimizer_config(config),
        config.offload,
        decoupled_lr=config.lr.decoupled_lr,
        decoupled_min_lr=config.lr.decoupled_min_lr,
        log=report_first,
        estimated_bytes=estimated_bytes(config, parallel_state.get_pipeline_model_parallel_rank()),
        run=run_shape(config),
        # A pipeline holds more micro-batches at once when the batch has grown.
        is_peak_early=len(config.batch_phases) == 1 or config.parallel.pipeline_model_parallel_size == 1,
    )
    for line in optimizer.describe():
        report_first(line)
    return optimizer


def optimizer_config(config: TrainingConfig) -> OptimizerConfig:
    """Return megatron-core's settings of the optimizer."""
    optim, precision = config.optim, config.precision
    return OptimizerConfig(
        optimizer=optim.optimizer,
        lr=config.lr.lr if config.lr.lr is not None else 0.0,
        min_lr=config.lr.min_lr,
        decoupled_lr=config.lr.decoupled_lr,
        decoupled_min_lr=config.lr.decoupled_min_lr,
        weight_decay=optim.weight_decay,
        decoupled_weight_decay=optim.decoupled_weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        clip_grad=optim.clip_grad,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        fp16=precision.fp16,
        bf16=precision.bf16,
        params_dtype=TORCH_DTYPES[precision.params_dtype],
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=True,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def _build_data(
    config: TrainingConfig,
    source: DataSource,
    tokenizer: Tokenizer,
    chunks: list[DistributedDataParallel],
    report_first: Callable[[str], None],
) -> TrainingData:
    report_first("> building train, validation, and test datasets ...")
    print_datasets(source, report_first)
    stages = []
    for chunk in chunks:
        place = {"ignore_virtual": False, "vp_stage": get_attr_wrapped_model(chunk, "vp_stage")}
        stages.append((parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place)))
    data = TrainingData(config, source, tokenizer, stages)
    dist.barrier()
    report_first("> finished creating GPT datasets ...")
    report_first(datetime_line("after dataloaders are built"))
    return data


def _say_what_is_known(postmortem: PostMortem, error: BaseException, iteration: int, ranks: Ranks) -> None:
    """Write the post-mortem of a failed rank, and say on standard error where it is and what may help."""
    folder, advice = postmortem.on_error(error, iteration), postmortem.advice(error)
    for line in (advice, folder and f"what was known is in {folder}"):
        if line:
            print(f"ERROR: rank {ranks.rank}: {line}", file=sys.stderr, flush=True)


def _clean_up_failure(optimizer: DeepOffloadOptimizer | None, ranks: Ranks) -> None:
    """Release what a failed run holds, within a time limit: lanes may wait for events that never come."""
    deadline = end_process_after(_SECONDS_TO_FAIL)
    if optimizer is not None:
        optimizer.close()
    if ranks.world_size == 1:
        shut_down()  # with other ranks it could wait for one that is in another collective
    deadline.cancel()


# -- what is printed at start and end -------------------------------------------------------------------------------


def _report(line: str) -> None:
    print(line, flush=True)


def _ignore(line: str) -> None:
    pass


def _print_arguments(config: TrainingConfig, report: Callable[[str], None]) -> None:
    """Print every setting by its flag's name, sorted, as Megatron does."""
    values = flat_settings(config)
    report("------------------------ arguments ------------------------")
    for name in sorted(values):
        report(f"  {name} {'.' * max(48 - len(name), 2)} {values[name]}")
    report("-------------------- end of arguments ---------------------")


def _print_notes(notes: Sequence[str], report: Callable[[str], None]) -> None:
    if notes:
        report("notes:")
    for number, note in enumerate(notes, start=1):
        report(f"  {number}. {note}")


def _print_parameters(chunks: list[DistributedDataParallel]) -> None:
    """Print how many parameters a model-parallel rank holds; one line from each, by its first data-parallel rank."""
    if parallel_state.get_data_parallel_rank() == 0:
        place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        _report(f" > number of parameters on (tensor, pipeline) model parallel rank {place}: {count}")


def _print_memory(optimizer: DeepOffloadOptimizer, device: torch.device, report: Callable[[str], None]) -> None:
    """Print bytes of state on this rank and the peaks of the process."""
    host, on_device = optimizer.memory_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = f"> memory: optimizer state {gibibytes(host)} host, {gibibytes(on_device)} device; "
    line += f"peak host {gibibytes(peak)}"
    if device.type == "cuda":
        line += f", peak device {gibibytes(torch.cuda.max_memory_allocated(device))}"
    report(line)


def _write_trace(optimizer: DeepOffloadOptimizer, path: str | None, report: Callable[[str], None]) -> None:
    """Write the last steps' lanes where --offload-trace says; a collective-free copy of rank 0's."""
    if path is None or dist.get_rank() != 0:
        return
    steps = []
    with SideFiles(report).writing(Path(path)):
        steps = write_trace(optimizer, Path(path))
    if not steps:
        return
    what, update = ("the last step's lanes", "update")
    if len(steps) > 1:
        what, update = f"the lanes of the last {len(steps)} steps", "last update"
    report(f"> wrote {what} to {path}: {update} {steps[-1].update_seconds * 1e3:.1f} ms")


def _print_traffic(here: dict[str, int], report: Callable[[str], None]) -> None:
    """Print what moved through each lane since the start, summed over all ranks."""
    totals: dict[str, int] = {}
    for ranks_traffic in from_all_ranks(here):
        for name, amount in ranks_traffic.items():
            totals[name] = totals.get(name, 0) + amount
    for name, amount in totals.items():
        lane, _, unit = name.rpartition("_")
        text = f"{gibibytes(amount)} ({amount} bytes)" if unit == "bytes" else f"{amount} {unit}"
        report(f"> moved by lane {lane}: {text}")
