"""Frozen settings: what they fill in, refuse, and derive (batch phases, schedule lengths, pipeline splits)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron.training import batch_schedule
from megatron.training.config import (
    BatchConfig,
    DataConfig,
    LRConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megatron.training.flags import SECTIONS, field_docs

MODEL = ModelConfig(num_layers=4, hidden_size=96, num_attention_heads=4, seq_length=32)


def training(**more) -> TrainingConfig:
    return TrainingConfig(**{"model": MODEL, "batch": BatchConfig(micro_batch_size=1, train_iters=10)} | more)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_has_a_docstring(section):
    """Each setting says what it is: the text becomes the flag's help."""
    cls, _ = SECTIONS[section]
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        assert docs[field.name].endswith("."), f"{cls.__name__}.{field.name}"
    assert cls.__doc__


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_are_frozen(section):
    """No setting can be changed after construction."""
    config = getattr(training(), section)
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)


def test_a_copy_with_one_change_stays_valid():
    """dataclasses.replace works on every section although some fields were filled in."""
    config = training(parallel=ParallelConfig(overlap_grad_reduce=True), world_size=2)
    for section in SECTIONS:
        part = getattr(config, section)
        assert dataclasses.replace(part) == part
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config.optim, weight_decay=0.5).end_weight_decay == 0.5


@pytest.mark.parametrize(
    ("hidden", "swiglu", "expected"),
    [(96, False, 384), (4096, True, 10880), (5120, True, 13632), (96, True, 256)],
)
def test_mlp_width_is_megatrons(hidden, swiglu, expected):
    """The MLP is 4 x hidden wide, or the largest multiple of 64 within 8/3 x hidden when gated."""
    model = ModelConfig(num_layers=1, hidden_size=hidden, num_attention_heads=4, seq_length=8, swiglu=swiglu)
    assert model.ffn_hidden_size == expected


def test_heads_are_filled_in():
    """Key and value heads default to the query heads, or to one group; head width to hidden / heads."""
    assert (MODEL.num_query_groups, MODEL.kv_channels, MODEL.max_position_embeddings) == (4, 24, 32)
    grouped = dataclasses.replace(MODEL, group_query_attention=True, num_query_groups=None)
    assert grouped.num_query_groups == 1


@pytest.mark.parametrize(
    ("precision", "params", "grads"),
    [
        (PrecisionConfig(), "fp32", "fp32"),
        (PrecisionConfig(bf16=True), "bf16", "fp32"),
        (PrecisionConfig(bf16=True, grad_reduce_in_bf16=True), "bf16", "bf16"),
        (PrecisionConfig(fp16=True), "fp16", "fp16"),
        (PrecisionConfig(fp16=True, accumulate_allreduce_grads_in_fp32=True), "fp16", "fp32"),
    ],
)
def test_gradient_type_follows_megatron(precision, params, grads):
    """bf16 keeps fp32 gradients unless told otherwise, fp16 keeps fp16 ones."""
    assert (precision.params_dtype, precision.grad_buffer_dtype) == (params, grads)


def test_param_wire_exists_only_for_16_bit_gradients():
    """The wire in the parameter's type would round an fp32 gradient buffer, so it is refused there."""
    wire = OffloadConfig(interleaved_offload=True, offload_grad_wire="param")
    training(offload=wire, precision=PrecisionConfig(fp16=True))
    training(offload=wire, precision=PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))
    for precision in (PrecisionConfig(), PrecisionConfig(bf16=True)):
        with pytest.raises(ValueError, match="would round gradients"):
            training(offload=wire, precision=precision)


def test_dynamic_loss_scale_turns_the_nan_check_off():
    """Overflows are how a dynamic loss scale works; a constant scale keeps the check."""
    assert not training(precision=PrecisionConfig(fp16=True)).optim.check_for_nan_in_loss_and_grad
    assert training(precision=PrecisionConfig(fp16=True, loss_scale=8.0)).optim.check_for_nan_in_loss_and_grad


def test_data_parallel_size_and_batch_are_filled_in():
    """What is left of the world is data parallel; without a global batch each rank takes one micro-batch."""
    config = training(world_size=8, parallel=ParallelConfig(tensor_model_parallel_size=2))
    assert (config.data_parallel_size, config.batch.global_batch_size, config.num_microbatches) == (4, 4, 1)


@pytest.mark.parametrize(
    ("vocab", "tensor", "expected"), [(50257, 1, 50304), (50257, 8, 51200), (128, 1, 128), (129, 2, 256)]
)
def test_vocabulary_is_padded(vocab, tensor, expected):
    """The embedding's rows are a multiple of 128 x tensor-parallel size, and the given size is kept."""
    parallel = ParallelConfig(tensor_model_parallel_size=tensor)
    config = training(
        parallel=parallel,
        world_size=tensor,
        model=dataclasses.replace(MODEL, num_attention_heads=8, num_query_groups=8, kv_channels=12),
    )
    assert config.with_vocab(vocab).data.padded_vocab_size == expected
    small = dataclasses.replace(config, data=DataConfig(padded_vocab_size=64))
    with pytest.raises(ValueError, match="--padded-vocab-size 64 is less than the tokenizer's"):
        small.with_vocab(vocab)


@pytest.mark.parametrize(
    ("layers", "parallel", "stages"),
    [
        (8, {}, None),
        (8, {"pipeline_model_parallel_size": 4}, None),
        (8, {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1}, 2),
        (8, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4}, 4),
        (8, {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}, None),
        (7, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3}, None),
        (
            8,
            {
                "pipeline_model_parallel_size": 4,
                "decoder_first_pipeline_num_layers": 1,
                "decoder_last_pipeline_num_layers": 1,
            },
            None,
        ),
        (
            6,
            {
                "pipeline_model_parallel_size": 2,
                "num_virtual_stages_per_pipeline_rank": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            2,
        ),
    ],
)
def test_virtual_stages(layers, parallel, stages):
    """Layers are cut over pipeline ranks and virtual stages, evenly unless an end has its own number."""
    assert ParallelConfig(**parallel).num_virtual_stages(layers) == stages


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (7, {"pipeline_model_parallel_size": 2}),
        (8, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3}),
        (8, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}),
        (8, {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1}),
        (
            8,
            {
                "pipeline_model_parallel_size": 2,
                "decoder_first_pipeline_num_layers": 3,
                "decoder_last_pipeline_num_layers": 3,
            },
        ),
        (2, {"pipeline_model_parallel_size": 4}),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(layers, parallel):
    """A split that leaves layers over names the numbers."""
    with pytest.raises(ValueError, match=f"--num-layers {layers}.* cannot be cut evenly into"):
        ParallelConfig(**parallel).num_virtual_stages(layers)


@pytest.mark.parametrize(
    ("block", "parallel", "layers"),
    [
        (3, {}, 4),
        (2, {"pipeline_model_parallel_size": 4}, 1),
        (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, 1),
        (2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}, 1),
    ],
)
def test_blocks_of_recomputation_divide_a_chunk(block, parallel, layers):
    """Uniform blocks that leave layers over are refused with both numbers; megatron-core would run out of layers."""
    shape = ParallelConfig(**parallel)
    uniform = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=block)
    batch = BatchConfig(micro_batch_size=1, global_batch_size=4, train_iters=10)
    world = {"parallel": shape, "world_size": shape.pipeline_model_parallel_size, "batch": batch}
    with pytest.raises(ValueError, match=f"the {layers} layers of a model chunk into blocks of .* {block}, which does"):
        training(recompute=uniform, **world)
    training(recompute=dataclasses.replace(uniform, recompute_method="block"), **world)


@pytest.mark.parametrize(
    ("group", "batch", "words"),
    [
        (None, {"global_batch_size": 4}, None),
        (None, {"global_batch_size": 2}, "a global batch of 2 is 1 x --micro-batch-size 1 for each pipeline"),
        (None, {}, "a global batch of 2 is 1 x"),
        (None, {"global_batch_size": 6}, "a global batch of 6 is 3 x"),
        (3, {"global_batch_size": 10}, None),
        (3, {"global_batch_size": 8}, "a global batch of 8 is 4 x .* in groups of 3"),
        (4, {"global_batch_size": 4}, "a global batch of 4 is 2 x .* in groups of 4"),
        (1, {"global_batch_size": 4}, "--microbatch-group-size-per-virtual-pipeline-stage 1 is less than"),
        (None, {"global_batch_size": 12, "rampup_batch_size": (4, 4, 60)}, None),
        (None, {"global_batch_size": 8, "rampup_batch_size": (4, 2, 60)}, "a global batch of 6 is 3 x"),
    ],
)
def test_virtual_stages_have_their_micro_batches(group, batch, words):
    """Every phase of the batch must suit the interleaved schedule, as megatron-core's own checks in a step want it."""
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=1,
        microbatch_group_size_per_vp_stage=group,
    )
    given = {"parallel": parallel, "world_size": 4, "batch": BatchConfig(micro_batch_size=1, train_iters=10, **batch)}
    if words is None:
        assert training(**given).virtual_pipeline_model_parallel_size == 2
        return
    with pytest.raises(ValueError, match=words):
        training(**given)


def test_interleaved_sends_between_two_ranks_must_overlap():
    """Batched sends between two ranks mix up the two directions, so they are refused."""
    with pytest.raises(ValueError, match="mix up the two directions"):
        ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, overlap_p2p_comm=False)
    assert not ParallelConfig().overlap_p2p_comm


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 300))
def test_ramp_up_is_megatrons(start, increment, steps, samples):
    """At every number of consumed samples the batch is the one of megatron-core's own calculator."""
    final = start + increment * steps
    phases = batch_schedule.rampup_phases(start, increment, samples, final)
    if steps and samples:
        reference = RampupBatchsizeNumMicroBatchesCalculator(
            global_batch_size=final,
            micro_batch_size=1,
            data_parallel_size=1,
            decrease_batch_size_if_needed=False,
            rank=1,
            start_global_batch_size=start,
            batch_size_increment=increment,
            ramup_samples=samples,
        )
        for consumed in range(samples + 3):
            reference.update(consumed, False)
            assert batch_schedule.batch_size_at(phases, consumed) == reference.get_current_global_batch_size()
    else:
        assert phases == ((0, final),)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 40), max_size=4), st.lists(st.integers(1, 9), min_size=5, max_size=5), st.integers(0, 60)
)
def test_samples_and_iterations_agree_with_a_walk(gaps, batches, iterations):
    """Counting phase by phase gives what taking one step after the other gives."""
    starts = [0]
    for gap in gaps:
        starts.append(starts[-1] + gap)
    phases = tuple(zip(starts, batches))
    consumed = 0
    for done in range(iterations):
        assert batch_schedule.samples_after(phases, done) == consumed
        assert batch_schedule.iterations_within(phases, consumed) == done
        batch = batch_schedule.batch_size_at(phases, consumed)
        assert batch_schedule.iterations_within(phases, consumed + batch - 1) == done
        consumed += batch


def test_step_schedule_counts_tokens():
    """Thresholds are tokens with K, M, B, T and become samples; the last size is the global batch."""
    batch = BatchConfig(micro_batch_size=1, step_batch_size_schedule="'0:4 1.28K:8,0.1M:12'", train_iters=5)
    config = training(batch=batch)
    assert config.batch_phases == ((0, 4), (40, 8), (3125, 12)) and config.batch.global_batch_size == 12
    assert [config.batch_size_at(n) for n in (0, 39, 40, 3124, 3125)] == [4, 4, 8, 8, 12]


def test_schedule_lengths_by_iterations():
    """Iterations become samples through the batch size of each phase."""
    batch = BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 8), train_iters=20)
    lr = LRConfig(lr=1.0, lr_warmup_iters=3, lr_decay_iters=10, lr_wsd_decay_iters=4, lr_decay_style="WSD")
    lengths = training(batch=batch, lr=lr).lr_samples
    assert (lengths.warmup, lengths.decay, lengths.wsd_decay) == (16, 72, 32)
    assert lengths.weight_decay == training(batch=batch).num_samples == 152


def test_schedule_lengths_by_samples():
    """Sample flags are lengths as they are; a fraction is of the decay."""
    batch = BatchConfig(micro_batch_size=1, global_batch_size=8, train_samples=1000)
    config = training(batch=batch, lr=LRConfig(lr=1.0, lr_warmup_fraction=0.1, lr_decay_samples=800))
    assert config.num_iterations == 125
    assert (config.lr_samples.warmup, config.lr_samples.decay, config.lr_samples.weight_decay) == (80.0, 800, 1000)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(num_layers=1, hidden_size=10, num_attention_heads=4, seq_length=8), "not a multiple of"),
        (lambda: dataclasses.replace(MODEL, num_query_groups=3), "not a multiple of --num-query-groups 3"),
        (lambda: dataclasses.replace(MODEL, hidden_dropout=1.5), "allowed are numbers from 0 to 1"),
        (lambda: OptimConfig(adam_beta2=1.0), "--adam-beta2 is 1.0, allowed are numbers from 0 to below 1"),
        (lambda: OptimConfig(weight_decay_incr_style="linear"), "needs --start-weight-decay: add it"),
        (lambda: RecomputeConfig(recompute_modules=("moe",)), "--recompute-modules moe is unknown"),
        (lambda: RecomputeConfig(recompute_method="block"), "is for --recompute-granularity full"),
        (lambda: training(world_size=0), "the world size 0 is not a multiple"),
        (
            lambda: training(
                model=dataclasses.replace(MODEL, num_attention_heads=3, num_query_groups=3, kv_channels=8),
                parallel=ParallelConfig(tensor_model_parallel_size=2),
                world_size=2,
            ),
            "--num-attention-heads 3 is not a multiple of --tensor-model-parallel-size 2",
        ),
    ],
)
def test_nonsense_is_refused(build, message):
    """Values that no run could use raise ValueError with what is allowed."""
    with pytest.raises(ValueError, match=message):
        build()
