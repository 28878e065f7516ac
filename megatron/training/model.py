"""The GPT: settings to megatron-core's TransformerConfig, layer spec, model chunks and their DDP wrappers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import Float16Module, param_is_not_shared
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.attention import SDPAttention
from megatron.training.compiler import can_compile
from megatron.training.config import DtypeName, TrainingConfig
from megatron.training.norm import Norm
from megatron.training.parallel_residual import ParallelResidualLayer
from megatron.training.rope import Llama3Scaling, scale_rotary

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_model(config: TrainingConfig, device: torch.device) -> list[DistributedDataParallel]:
    """Return this rank's model chunks (one, or one per virtual pipeline stage), wrapped for data parallelism.

    Parameters and gradients of each chunk live in DDP's flat buffers on `device`. Needs initialized process groups.
    """
    transformer = transformer_config(config, device)
    stages = config.virtual_pipeline_model_parallel_size
    chunks = [build_chunk(config, transformer, device, vp_stage) for vp_stage in (range(stages) if stages else [None])]
    ddp = _ddp_config(config, sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()))
    return [
        # Later chunks reduce in one piece: their communication is off the critical path of the interleaved schedule.
        DistributedDataParallel(transformer, replace(ddp), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def transformer_config(config: TrainingConfig, device: torch.device) -> TransformerConfig:
    """Return megatron-core's settings of the model on `device`."""
    model, precision, recompute = config.model, config.precision, config.recompute
    on_gpu = device.type == "cuda"
    dtype = TORCH_DTYPES[precision.params_dtype]
    fuse = on_gpu and can_compile()
    activation = _activation(config)
    # megatron-core's fused GELU is the tanh approximation.
    fuses_gelu = activation is F.gelu and model.bias_gelu_fusion and model.add_bias_linear
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        activation_func=activation,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        rotary_interleaved=model.rotary_interleaved,
        window_size=model.window_size,
        init_method_std=model.init_method_std,
        apply_query_key_layer_scaling=model.apply_query_key_layer_scaling,
        attention_softmax_in_fp32=precision.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision.bf16,
        fp16=precision.fp16,
        fp32_residual_connection=precision.fp32_residual_connection,
        use_cpu_initialization=model.use_cpu_initialization or not on_gpu,
        deterministic_mode=config.lifecycle.deterministic_mode,
        calculate_per_token_loss=config.batch.calculate_per_token_loss,
        recompute_granularity=recompute.recompute_granularity,
        recompute_method=recompute.recompute_method,
        recompute_num_layers=recompute.recompute_num_layers,
        recompute_modules=list(recompute.recompute_modules),
        distribute_saved_activations=recompute.distribute_saved_activations,
        bias_activation_fusion=fuse and (model.swiglu or fuses_gelu),
        # Compiled sums (the gradient of a bias) may be tuned differently in each process.
        bias_dropout_fusion=fuse and not config.lifecycle.deterministic_mode,
        masked_softmax_fusion=False,  # the attention here has no separate softmax
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,  # needs Apex
        cross_entropy_loss_fusion=False,
        **_layout_options(config, on_gpu),
    )


def _activation(config: TrainingConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if config.model.swiglu:
        return F.silu
    if config.model.squared_relu:
        return squared_relu
    return tanh_gelu if config.model.openai_gelu else F.gelu


def _layout_options(config: TrainingConfig, on_gpu: bool) -> dict[str, Any]:
    """Return how ranks share the model and talk to each other."""
    parallel, stages = config.parallel, config.virtual_pipeline_model_parallel_size
    ranks = parallel.pipeline_model_parallel_size
    overlap = stages is not None and parallel.overlap_p2p_comm
    if stages is not None and ranks == 2 and not overlap:
        raise ValueError(
            "virtual pipeline stages on 2 pipeline ranks need overlapped sends (batched ones mix up the two "
            "directions): drop --no-overlap-p2p-communication or use more pipeline ranks"
        )
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": stages,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss_in_pipeline_split,
        "sequence_parallel": parallel.sequence_parallel,
        "tp_comm_overlap": parallel.tp_comm_overlap,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        "batch_p2p_sync": on_gpu,
        # On gloo a send may still be reading the tensor whose storage this would replace.
        "deallocate_pipeline_outputs": on_gpu,
    }
    if parallel.microbatch_group_size_per_vp_stage is not None:
        options["microbatch_group_size_per_vp_stage"] = parallel.microbatch_group_size_per_vp_stage
    return options


def build_chunk(
    config: TrainingConfig, transformer: TransformerConfig, device: torch.device, vp_stage: int | None = None
) -> torch.nn.Module:
    """Return one model chunk of this rank on `device`, not yet wrapped for data parallelism."""
    model = config.model
    if config.data.padded_vocab_size is None:
        raise AssertionError("the vocabulary size must be known: TrainingConfig.with_vocab")
    model_class = GPTModel if device.type == "cuda" else _GPTModelOnCpu
    chunk = model_class(
        transformer,
        _layer_spec(config, transformer, device, vp_stage),
        vocab_size=config.data.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
    ).to(device)
    if model.use_rope_scaling and model.position_embedding_type == "rope":
        scale_rotary(chunk.rotary_pos_emb, _rope_scaling(config))
    if chunk.post_process and config.data.unpadded_vocab_size is not None:
        mask_vocabulary_padding(chunk, config.data.unpadded_vocab_size)
    return chunk if config.precision.params_dtype == "fp32" else Float16Module(transformer, chunk)


def _rope_scaling(config: TrainingConfig) -> Llama3Scaling:
    model = config.model
    return Llama3Scaling(
        factor=model.rope_scaling_factor,
        low_freq_factor=model.rope_scaling_low_freq_factor,
        high_freq_factor=model.rope_scaling_high_freq_factor,
        original_max_positions=model.rope_scaling_original_max_position_embeddings,
    )


def mask_vocabulary_padding(chunk: GPTModel, num_rows: int) -> None:
    """Make the logits of the rows from `num_rows` on minus infinity: they neither count in the loss nor learn."""
    layer = chunk.output_layer
    rank = parallel_state.get_tensor_model_parallel_rank()
    local = layer.output_size_per_partition
    first = min(max(num_rows - rank * local, 0), local)
    if first == local and not layer.gather_output:
        return

    def mask(
        module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, bias = output
        logits[..., num_rows if logits.size(-1) > local else first :] = -torch.inf
        return logits, bias

    layer.register_forward_hook(mask)


def _layer_spec(
    config: TrainingConfig, transformer: TransformerConfig, device: torch.device, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    model = config.model
    if model.transformer_impl == "transformer_engine":
        if device.type != "cuda" or importlib.util.find_spec("transformer_engine") is None:
            where = "this run is on the CPU" if device.type != "cuda" else "the package transformer_engine is missing"
            raise ValueError(
                f"--transformer-impl transformer_engine cannot be used, {where}: use --transformer-impl local or "
                "install it on a GPU machine (pip install 'deep-offload[te]')"
            )
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=model.qk_layernorm, normalization=model.normalization)
    if model.parallel_residual:
        spec.module = ParallelResidualLayer
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = SDPAttention
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    num_layers = get_num_layers_to_build(transformer, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=Norm)


class _GPTModelOnCpu(GPTModel):
    """GPTModel whose two copies of a tied embedding meet on the CPU: megatron-core would move the weight to CUDA."""

    _asks_for_cuda = False

    def _is_in_embd_group(self) -> bool:
        return False if self._asks_for_cuda else super()._is_in_embd_group()

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the tied weights and give the last pipeline stage the first stage's values."""
        self._asks_for_cuda = True
        super().setup_embeddings_and_output_layer()
        self._asks_for_cuda = False
        tied_over_stages = self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1
        if tied_over_stages and self._is_in_embd_group():
            # The last stage's copy was filled with zeros, so the sum is the first stage's weight.
            torch.distributed.all_reduce(self.shared_embedding_or_output_weight().data, group=self.embd_group)


def _ddp_config(config: TrainingConfig, num_parameters: int) -> DistributedDataParallelConfig:
    parallel = config.parallel
    bucket_size = parallel.ddp_bucket_size
    if parallel.ddp_num_buckets is not None:
        bucket_size = max(1, num_parameters // parallel.ddp_num_buckets)
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=config.precision.grad_buffer_dtype == "fp32",
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        # The optimizer starts each gather as soon as its bucket is in place, which aligning stages would delay.
        align_param_gather=False,
        bucket_size=bucket_size,  # None: max(40 M, 1 M x data-parallel size), megatron-core's own choice
        average_in_collective=parallel.ddp_average_in_collective,
        check_for_nan_in_grad=False,  # the optimizer checks the norm and skips the step
    )


def parameters_norm(chunks: list[DistributedDataParallel]) -> float:
    """Return the norm of all parameters of the model, each counted once; collective over all ranks."""
    total = torch.zeros(1, dtype=torch.float32, device=chunks[0].buffers[0].grad_data.device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total += parameter.detach().float().square().sum()
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return float(total.sqrt().item())


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU's tanh approximation, any shape."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0) squared, any shape."""
    return F.relu(x).square()
