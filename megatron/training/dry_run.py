"""`--dry-run`: what a run would take and how fast it would be, before anything is allocated. Imports no torch."""

from __future__ import annotations

import os

from deep_offload.model.dry_run import DryRun, dry_run_report
from deep_offload.model.gpt import GPTShape, ParallelShape
from deep_offload.model.residency import working_bytes
from deep_offload.model.run import RecomputeShape, RunShape, model_bytes
from deep_offload.model.this_machine import find_this_machine, training_profile
from megatron.training.config import TrainingConfig
from megatron.training.launch import find_ranks
from megatron.training.tokenizer import build_tokenizer


def dry_run(config: TrainingConfig) -> DryRun:
    """Report bytes, placement and predicted times of every pipeline stage, by the rates that training would go by.

    Raises ValueError for unusable settings.
    """
    machine, threads = find_this_machine(use_cpu=config.lifecycle.use_cpu), config.offload.offload_cpu_threads
    ranks = find_ranks(os.environ).local_world_size
    given = config.offload.offload_profile
    profile, line = training_profile(given, machine, ranks, None if threads == "auto" else threads)
    report = dry_run_report(run_shape(_with_vocab(config)), config.offload, profile, ranks)
    return DryRun([line, *report.lines], report.fits)


def estimated_bytes(config: TrainingConfig, pipeline_rank: int) -> int:
    """GPU bytes of a rank of this pipeline stage beside weights, gradients and state; the vocabulary must be known."""
    return working_bytes(model_bytes(run_shape(config), pipeline_rank))


def run_shape(config: TrainingConfig) -> RunShape:
    """The run as the numbers that its bytes and seconds follow from."""
    model, parallel, recompute = config.model, config.parallel, config.recompute
    grad_bytes = 4 if config.precision.grad_buffer_dtype == "fp32" else 2
    return RunShape(
        model=GPTShape(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            padded_vocab_size=config.data.padded_vocab_size or 0,
            swiglu=model.swiglu,
            normalization=model.normalization,
            add_bias_linear=model.add_bias_linear,
            add_qkv_bias=model.add_qkv_bias,
            qk_layernorm=model.qk_layernorm,
            tie_embeddings=not model.untie_embeddings_and_output_weights,
            positions=model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0,
        ),
        parallel=ParallelShape(
            tensor=parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            virtual=config.virtual_pipeline_model_parallel_size or 1,
            data=config.data_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            first_layers=parallel.decoder_first_pipeline_num_layers,
            last_layers=parallel.decoder_last_pipeline_num_layers,
            counts_embedding=parallel.account_for_embedding_in_pipeline_split,
            counts_loss=parallel.account_for_loss_in_pipeline_split,
        ),
        seq_length=model.seq_length,
        micro_batch_size=config.batch.micro_batch_size,
        global_batch_size=config.batch.global_batch_size,
        param_bytes=4 if config.precision.params_dtype == "fp32" else 2,
        grad_bytes=grad_bytes,
        is_bf16=config.precision.bf16,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        bucket_size=parallel.ddp_bucket_size,
        recompute=RecomputeShape(
            granularity=recompute.recompute_granularity,
            method=recompute.recompute_method,
            num_layers=recompute.recompute_num_layers or 1,
            modules=recompute.recompute_modules,
            is_distributed=recompute.distribute_saved_activations,
        ),
        has_hidden_dropout=model.hidden_dropout > 0,
        has_rope=model.position_embedding_type == "rope",
    )


def _with_vocab(config: TrainingConfig) -> TrainingConfig:
    if config.data.padded_vocab_size is not None:
        return config
    data = config.data
    if data.tokenizer_type is None and data.vocab_size is None:
        raise ValueError(
            "the size of the vocabulary is not known: give --tokenizer-type and its files, or --vocab-size"
        )
    if data.tokenizer_type is None:
        return config.with_vocab(data.vocab_size)
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=data.vocab_size,
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
    )
    return config.with_vocab(tokenizer.vocab_size)
