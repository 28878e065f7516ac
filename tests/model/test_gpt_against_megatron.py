"""The pure description of a GPT and of DDP buffers against megatron-core, on a process group that only pretends."""

from __future__ import annotations

import dataclasses

import pytest

from deep_offload.model.buckets import rank_buffers
from deep_offload.model.gpt import GPTShape, ParallelShape, chunk_params
from deep_offload.model.run import RecomputeShape, RunShape, layer_bytes, model_bytes

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

LLAMA = GPTShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=160,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=8,
    padded_vocab_size=512,
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    tie_embeddings=False,
)
GPT2 = dataclasses.replace(
    LLAMA,
    swiglu=False,
    normalization="LayerNorm",
    add_bias_linear=True,
    tie_embeddings=True,
    num_query_groups=8,
    positions=128,
)
QWEN = dataclasses.replace(LLAMA, add_qkv_bias=True, qk_layernorm=True, kv_channels=16)

CASES = [
    ("llama, one rank", LLAMA, ParallelShape(), False, None),
    ("llama, data 4, buckets", LLAMA, ParallelShape(data=4), True, 30_000),
    ("llama, data 3, tensor 2", LLAMA, ParallelShape(data=3, tensor=2), True, 20_000),
    ("gpt2, one rank, buckets", GPT2, ParallelShape(), True, 25_000),
    ("gpt2, pipeline 2, tied over stages", GPT2, ParallelShape(pipeline=2, data=2), True, 25_000),
    ("gpt2, pipeline 2, one bucket", GPT2, ParallelShape(pipeline=2, data=2), False, None),
    (
        "qwen, tensor 2, pipeline 2, virtual 2",
        QWEN,
        ParallelShape(tensor=2, pipeline=2, virtual=2, data=2),
        True,
        15_000,
    ),
    ("llama, uneven pipeline", LLAMA, ParallelShape(pipeline=2, first_layers=1), True, 30_000),
    (
        "llama, embedding and loss count",
        dataclasses.replace(LLAMA, num_layers=6),
        ParallelShape(pipeline=2, counts_embedding=True, counts_loss=True),
        False,
        None,
    ),
]


@pytest.fixture(scope="module")
def on_cpu():
    from megatron.training import cpu

    if not torch.cuda.is_available():
        cpu.enable()


@pytest.fixture
def ranks(on_cpu):
    """A function that makes this process rank (pipeline, 0, 0) of a job whose collectives do nothing."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(parallel: ParallelShape, pipeline_rank: int) -> None:
        leave()
        rank = pipeline_rank * parallel.tensor * parallel.data
        torch.distributed.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual if parallel.virtual > 1 else None,
            create_gloo_process_groups=False,
        )

    def leave() -> None:
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()

    yield become
    leave()


def build_chunk(shape: GPTShape, parallel: ParallelShape, vp_stage: int | None, spec=None, **settings):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization=shape.normalization,
        gated_linear_unit=shape.swiglu,
        activation_func=torch.nn.functional.silu if shape.swiglu else torch.nn.functional.gelu,
        add_bias_linear=shape.add_bias_linear,
        add_qkv_bias=shape.add_qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_layers,
        num_layers_in_last_pipeline_stage=parallel.last_layers,
        account_for_embedding_in_pipeline_split=parallel.counts_embedding,
        account_for_loss_in_pipeline_split=parallel.counts_loss,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        batch_p2p_comm=False,
        overlap_p2p_comm=parallel.virtual > 1,
        **settings,
    )
    return GPTModel(
        config,
        spec or get_gpt_layer_local_spec(normalization=shape.normalization, qk_layernorm=shape.qk_layernorm),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.positions or 128,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="learned_absolute" if shape.positions else "rope",
        vp_stage=vp_stage,
    )


def wrap(chunks, overlap: bool, bucket_size: int | None):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=bucket_size
    )
    return [
        DistributedDataParallel(c.config, dataclasses.replace(config), c, disable_bucketing=i > 0)
        for i, c in enumerate(chunks)
    ]


@pytest.mark.parametrize(
    ("shape", "parallel", "overlap", "bucket_size"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_names_shapes_and_buckets(ranks, monkeypatch, shape, parallel, overlap, bucket_size):
    """Names, shapes, order, bucket borders and offsets equal megatron-core's on every pipeline rank."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self, raising=False)  # a tied weight is moved there
    for pipeline_rank in range(parallel.pipeline):
        ranks(parallel, pipeline_rank)
        stages = range(parallel.virtual) if parallel.virtual > 1 else [None]
        chunks = [build_chunk(shape, parallel, stage) for stage in stages]
        for stage, chunk in enumerate(chunks):
            expected = chunk_params(shape, parallel, pipeline_rank, stage)
            assert [(p.name, p.shape) for p in expected] == [(n, tuple(p.shape)) for n, p in chunk.named_parameters()]
        names = [{p: n for n, p in chunk.named_parameters()} for chunk in chunks]
        wrapped = wrap(chunks, overlap, bucket_size)
        ours = rank_buffers(shape, parallel, pipeline_rank, overlap_grad_reduce=overlap, bucket_size=bucket_size)
        for ddp, name_of, buckets in zip(wrapped, names, ours.chunks, strict=True):
            (buffer,) = ddp.buffers
            real = [(b.offset, b.offset + b.grad_data.numel()) for b in buffer.buckets]
            assert [(b.start, b.end) for b in buckets] == real
            offsets = {name_of[p]: (start, end) for p, (start, end, _) in buffer.param_index_map.items()}
            assert {name: (start, end) for b in buckets for name, start, end in b.offsets} == offsets
            assert sum(b.numel for b in buckets) == buffer.numel
        shards = ours.shards(2, 4)
        assert sum(s.numel for s in shards) * parallel.data == ours.numel == sum(d.buffers[0].numel for d in wrapped)


def test_a_wrong_order_would_be_seen():
    """The buckets of parameters in another order differ: the comparison above can fail."""
    from deep_offload.model.buckets import ddp_buckets

    params = chunk_params(LLAMA, ParallelShape())
    assert ddp_buckets(params, 4, 30_000) != ddp_buckets(params[::-1], 4, 30_000)


# LayerNorm, whose CPU kernel saves what the GPU's does; torch's RMSNorm on the CPU saves fp32 copies.
GATED = dataclasses.replace(
    LLAMA, hidden_size=128, ffn_hidden_size=352, num_query_groups=2, kv_channels=16, normalization="LayerNorm"
)
PLAIN = dataclasses.replace(GATED, swiglu=False, add_bias_linear=True, num_query_groups=8)


def saved_bytes(model, seq_length: int, batch: int) -> int:
    """Bytes of distinct tensors, parameters aside, that a forward pass saves for the backward pass."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # a freed address could be used twice
        return tensor

    tokens = torch.zeros(batch, seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, torch.arange(seq_length)[None], None, labels=tokens)
    assert loss.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("shape", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("recompute", [RecomputeShape(), RecomputeShape(granularity="full", method="uniform")])
def test_activations_are_what_layers_save(ranks, shape, batch, recompute):
    """Two more layers of the real model save two more times the predicted bytes, within 1 %, recomputed or not."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    from megatron.training.attention import SDPAttention

    ranks(ParallelShape(), 0)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    spec = get_gpt_layer_local_spec(normalization=shape.normalization)
    spec.submodules.self_attention.submodules.core_attention = SDPAttention
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    settings = dict(bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0)
    settings |= dict(masked_softmax_fusion=False) | (full if recompute.granularity == "full" else {})
    measured = []
    for layers in (2, 4):
        model = build_chunk(dataclasses.replace(shape, num_layers=layers), ParallelShape(), None, spec, **settings)
        measured.append(saved_bytes(Float16Module(model.config, model), 128, batch))
    run = RunShape(
        model=dataclasses.replace(shape, num_layers=2),
        parallel=ParallelShape(),
        seq_length=128,
        micro_batch_size=batch,
        global_batch_size=batch,
        is_fused=False,
        recompute=recompute,
    )
    predicted = model_bytes(run).activations
    if recompute.granularity == "full":
        predicted -= layer_bytes(run)  # the layer that is recomputed is alive in the backward pass only
    assert measured[1] - measured[0] == pytest.approx(predicted, rel=0.01)
