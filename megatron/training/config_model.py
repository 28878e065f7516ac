"""Settings of the model, its precision, its parallel layout and recomputation. Standard library only.

Fields carry Megatron's argument names in snake_case and its defaults. `FILLED` marks a default that the class
itself computes from its other fields at construction, so that every value of a finished object is final.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FILLED: Any = None
"""Default of a field that `__post_init__` fills: None only while the object is being built."""

DtypeName = Literal["fp32", "bf16", "fp16"]


def fill(config: object, name: str, value: object) -> None:
    """Set a field of a frozen config. Only its own `__post_init__` may call this."""
    object.__setattr__(config, name, value)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive(flag: str, value: float) -> None:
    """Raise ValueError unless the flag's value is more than 0."""
    require(value > 0, f"{flag} is {value}, it must be more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the GPT."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Query heads of one layer."""

    seq_length: int
    """Tokens of one sample."""

    max_position_embeddings: int = FILLED
    """Longest sequence the position embedding can express. Not given: the sequence length."""

    ffn_hidden_size: int = FILLED
    """Width of the MLP. Not given: 4 x hidden, or int(8 x hidden / 3 / 64) x 64 with --swiglu."""

    group_query_attention: bool = False
    """Share each key and value head among several query heads."""

    num_query_groups: int = FILLED
    """Key and value heads with --group-query-attention (Megatron's default is 1); the query heads without it."""

    kv_channels: int = FILLED
    """Width of one head. Not given: hidden / query heads."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions are encoded."""

    rotary_base: int = 10000
    """Base of the rotary frequencies, a whole number."""

    rotary_percent: float = 1.0
    """Part of each head that is rotated, 0..1."""

    rotary_interleaved: bool = False
    """Rotate pairs of neighbours instead of two halves."""

    rotary_seq_len_interpolation_factor: int | None = None
    """Divide positions by this number before rotating."""

    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling: long wavelengths become this many times longer."""

    rope_scaling_low_freq_factor: float = 1.0
    """--use-rope-scaling lengthens wavelengths beyond the original maximum position over this number."""

    rope_scaling_high_freq_factor: float = 4.0
    """--use-rope-scaling leaves wavelengths below the original maximum position over this number alone."""

    rope_scaling_original_max_position_embeddings: int = 8192
    """Longest sequence of the model before --use-rope-scaling."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""

    norm_epsilon: float = 1e-5
    """Added to the variance inside the norms."""

    apply_layernorm_1p: bool = False
    """Keep norm weights as their difference from 1 (needs TransformerEngine)."""

    swiglu: bool = False
    """Gated MLP with SiLU."""

    squared_relu: bool = False
    """MLP with squared ReLU instead of GELU."""

    openai_gelu: bool = False
    """MLP with GELU's tanh approximation, on every device."""

    bias_gelu_fusion: bool = True
    """On GPUs, GELU is fused with its bias, as in Megatron: in its tanh approximation. Off: exact GELU everywhere."""

    parallel_residual: bool = False
    """Attention and MLP read the same input and are added to it together, as in GPT-NeoX."""

    add_bias_linear: bool = True
    """Give linear layers a bias."""

    add_qkv_bias: bool = False
    """Give the query, key and value projection a bias even with --disable-bias-linear."""

    qk_layernorm: bool = False
    """Normalize queries and keys, per head."""

    window_size: tuple[int, int] | None = None
    """Attend to at most LEFT,RIGHT tokens around a token; -1 is no limit, 0 is the token itself."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights instead of the embedding's."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this number times the tensor-parallel size."""

    attention_dropout: float = 0.1
    """Dropout of attention probabilities, 0..1."""

    hidden_dropout: float = 0.1
    """Dropout of the residual branches and embeddings, 0..1."""

    init_method_std: float = 0.02
    """Standard deviation of the normal initialization."""

    apply_query_key_layer_scaling: bool = False
    """Scale attention scores by 1/layer number, for fp16 (turns fp32 softmax on)."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Layer implementation; transformer_engine needs that package (Megatron's default is transformer_engine)."""

    use_cpu_initialization: bool = False
    """Initialize the weights on the CPU: the same bits for every tensor-parallel size."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "rotary_base"):
            require_positive("--" + name.replace("_", "-"), getattr(self, name))
        if self.max_position_embeddings is None:
            fill(self, "max_position_embeddings", self.seq_length)
        if self.ffn_hidden_size is None:
            gated = int(self.hidden_size * 4 * 2 / 3 / 64) * 64
            fill(self, "ffn_hidden_size", gated if self.swiglu else 4 * self.hidden_size)
        if self.kv_channels is None:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them or give --kv-channels",
            )
            fill(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.num_query_groups is None:
            fill(self, "num_query_groups", 1 if self.group_query_attention else self.num_attention_heads)
        self._check()

    def _check(self) -> None:
        require(
            self.max_position_embeddings >= self.seq_length,
            f"--max-position-embeddings {self.max_position_embeddings} is less than --seq-length {self.seq_length}: "
            "raise it to at least the sequence length",
        )
        require(
            self.num_query_groups >= 1 and self.num_attention_heads % self.num_query_groups == 0,
            f"--num-attention-heads {self.num_attention_heads} is not a multiple of --num-query-groups "
            f"{self.num_query_groups}: change one of them",
        )
        activations = (
            ("--swiglu", self.swiglu),
            ("--squared-relu", self.squared_relu),
            ("--openai-gelu", self.openai_gelu),
        )
        chosen = [flag for flag, is_on in activations if is_on]
        require(len(chosen) <= 1, f"{' and '.join(chosen)} exclude each other: give one")
        for name in ("rotary_percent", "attention_dropout", "hidden_dropout"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            require(0.0 <= value <= 1.0, f"{flag} is {value}, allowed are numbers from 0 to 1")
        names = (
            "ffn_hidden_size",
            "kv_channels",
            "make_vocab_size_divisible_by",
            "norm_epsilon",
            "rope_scaling_factor",
            "rope_scaling_low_freq_factor",
            "rope_scaling_original_max_position_embeddings",
        )
        for name in names:
            require_positive("--" + name.replace("_", "-"), getattr(self, name))
        require(
            self.rope_scaling_high_freq_factor > self.rope_scaling_low_freq_factor,
            f"--rope-scaling-high-freq-factor {self.rope_scaling_high_freq_factor} is not more than "
            f"--rope-scaling-low-freq-factor {self.rope_scaling_low_freq_factor}: raise it",
        )
        require(
            not self.parallel_residual or self.transformer_impl == "local",
            "--parallel-residual is built for the local layers only: use --transformer-impl local",
        )

    def padded_vocab_size(self, vocab_size: int, tensor_model_parallel_size: int) -> int:
        """Return the rows of the embedding for a tokenizer of `vocab_size` entries."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Types of parameters, gradients and the loss scale."""

    bf16: bool = False
    """Train in bfloat16. Turns fp32 gradient accumulation on unless --grad-reduce-in-bf16."""

    fp16: bool = False
    """Train in float16 with a loss scale."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Keep and reduce gradients in fp32."""

    grad_reduce_in_bf16: bool = False
    """Keep and reduce gradients in bfloat16 instead of fp32 (with --bf16)."""

    attention_softmax_in_fp32: bool = False
    """Compute the attention softmax in fp32. The fused attention always accumulates in fp32."""

    loss_scale: float | None = None
    """Constant loss scale for --fp16, a power of two. Not given, or 0: dynamic."""

    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""

    min_loss_scale: float = 1.0
    """Smallest value of the dynamic loss scale."""

    loss_scale_window: float = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""

    hysteresis: int = 2
    """Overflows after which the dynamic loss scale halves."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""

    def __post_init__(self) -> None:
        require(not (self.bf16 and self.fp16), "--bf16 and --fp16 exclude each other: give only one of them")
        require(
            self.bf16 or not self.grad_reduce_in_bf16,
            "--grad-reduce-in-bf16 keeps gradients in bfloat16, which only --bf16 training has: add --bf16 or drop it",
        )
        require(
            not (self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32),
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give only one of them",
        )
        require(
            self.loss_scale in (None, 0.0, 1.0) or self.fp16,
            f"--loss-scale {self.loss_scale} is for --fp16 only: add --fp16 or drop it",
        )
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            require_positive("--" + name.replace("_", "-"), getattr(self, name))
        if self.loss_scale == 0.0:  # Megatron's other spelling of "dynamic"
            fill(self, "loss_scale", None)
        elif self.loss_scale is not None:
            require_positive("--loss-scale", self.loss_scale)
        if self.bf16 and not self.grad_reduce_in_bf16:
            fill(self, "accumulate_allreduce_grads_in_fp32", True)

    @property
    def params_dtype(self) -> DtypeName:
        """Type of the model's parameters and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def grad_buffer_dtype(self) -> DtypeName:
        """Type of DDP's gradient buffers."""
        return "fp32" if self.accumulate_allreduce_grads_in_fp32 else self.params_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the model, and how DDP communicates."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""

    pipeline_model_parallel_size: int = 1
    """Ranks that each hold a part of the layers."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one virtual stage: turns the interleaved pipeline schedule on."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of one pipeline rank: the other way to ask for the interleaved schedule."""

    microbatch_group_size_per_vp_stage: int | None = None
    """Micro-batches that a virtual stage runs in a row. Not given: the pipeline size."""

    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over the tensor-parallel ranks."""

    context_parallel_size: int = 1
    """Ranks that share each sequence; only 1."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks. Here it always is: a shard is what is offloaded."""

    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during the backward pass."""

    overlap_param_gather: bool = False
    """Gather updated parameters bucket by bucket during the next forward pass (needs --overlap-grad-reduce)."""

    overlap_p2p_comm: bool = True
    """Overlap the sends of the interleaved pipeline schedule with compute; never without that schedule."""

    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank. Not given: all ranks have the same number."""

    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank. Not given: all ranks have the same number."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split over pipeline ranks."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as one layer when layers are split over pipeline ranks."""

    ddp_bucket_size: int | None = None
    """Elements of one gradient bucket. Not given: max(40 M, 1 M x data-parallel size)."""

    ddp_num_buckets: int | None = None
    """Number of gradient buckets; instead of --ddp-bucket-size."""

    ddp_average_in_collective: bool = False
    """Average gradients inside the reduction instead of scaling them before it."""

    use_tp_pp_dp_mapping: bool = False
    """Number ranks tensor, pipeline, data instead of tensor, data, pipeline."""

    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with matrix products (needs TransformerEngine)."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Communication library on GPUs. CPU runs always use gloo."""

    distributed_timeout_minutes: int = 10
    """Minutes after which a stuck collective ends the run."""

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_timeout_minutes"):
            require_positive("--" + name.replace("_", "-"), getattr(self, name))
        require(
            self.context_parallel_size == 1,
            f"--context-parallel-size {self.context_parallel_size} is not built here, only 1 is allowed: "
            "use --tensor-model-parallel-size with --sequence-parallel for long sequences",
        )
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "--sequence-parallel needs --tensor-model-parallel-size of at least 2: raise it or drop the flag",
        )
        require(
            not self.overlap_param_gather or self.overlap_grad_reduce,
            "--overlap-param-gather needs --overlap-grad-reduce: add it",
        )
        require(
            self.ddp_bucket_size is None or self.ddp_num_buckets is None,
            "--ddp-bucket-size and --ddp-num-buckets both choose the buckets: give only one of them",
        )
        require(
            self.num_layers_per_virtual_pipeline_stage is None or self.num_virtual_stages_per_pipeline_rank is None,
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both choose the "
            "virtual stages: give only one of them",
        )
        pipeline = self.pipeline_model_parallel_size
        require(
            pipeline > 1 or not (self.is_interleaved or self.is_uneven),
            "virtual stages and an uneven split need --pipeline-model-parallel-size of at least 2: raise it or "
            "drop them",
        )
        if not self.is_interleaved:
            fill(self, "overlap_p2p_comm", False)
        require(
            not self.is_interleaved or pipeline > 2 or self.overlap_p2p_comm,
            "--no-overlap-p2p-communication with virtual stages needs --pipeline-model-parallel-size of at least 3: "
            "batched sends between 2 ranks mix up the two directions",
        )

    @property
    def is_interleaved(self) -> bool:
        """Whether the interleaved pipeline schedule was asked for."""
        return (self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank) is not None

    @property
    def is_uneven(self) -> bool:
        """Whether the first or last pipeline rank holds its own number of layers."""
        return (self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers) is not None

    def num_virtual_stages(self, num_layers: int) -> int | None:
        """Return the model chunks of one rank (Megatron's virtual_pipeline_model_parallel_size), None without.

        Raises ValueError for layers that cannot be split as asked.
        """
        pipeline, stages = self.pipeline_model_parallel_size, self.num_virtual_stages_per_pipeline_rank or 1
        middle = num_layers - (self.decoder_first_pipeline_num_layers or 0)
        middle -= self.decoder_last_pipeline_num_layers or 0
        middle += self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        ranks = pipeline - (self.decoder_first_pipeline_num_layers is not None)
        ranks -= self.decoder_last_pipeline_num_layers is not None
        per_stage = self.num_layers_per_virtual_pipeline_stage
        unit = f"{ranks} pipeline ranks" if stages == 1 else f"{ranks} pipeline ranks of {stages} virtual stages"
        if per_stage is not None:
            unit = f"{ranks} pipeline ranks with --num-layers-per-virtual-pipeline-stage {per_stage}"
            require(middle % (ranks * per_stage) == 0, _split_message(num_layers, middle, unit))
            stages = middle // ranks // per_stage
        if ranks == 0:
            require(middle == 0, _split_message(num_layers, middle, "no further pipeline rank"))
        else:
            require(
                middle >= ranks * stages and middle % (ranks * stages) == 0, _split_message(num_layers, middle, unit)
            )
        return stages if stages > 1 else None


def _split_message(num_layers: int, middle: int, unit: str) -> str:
    rest = "" if middle == num_layers else f" ({middle} after the uneven part)"
    return f"--num-layers {num_layers}{rest} cannot be cut evenly into {unit}: change one of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """Which activations are computed again in the backward pass."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """selective recomputes parts of a layer (--recompute-modules), full recomputes whole layers."""

    recompute_method: Literal["uniform", "block"] | None = None
    """full: cut all layers into equal blocks, or recompute the first --recompute-num-layers of each stage."""

    recompute_num_layers: int | None = None
    """full: layers of one block (uniform), or layers recomputed per stage (block)."""

    recompute_modules: tuple[str, ...] = ("core_attn",)
    """selective: which parts; core_attn, mlp, layernorm."""

    distribute_saved_activations: bool = False
    """full: split saved activations over the tensor-parallel ranks."""

    def __post_init__(self) -> None:
        known = ("core_attn", "mlp", "layernorm")
        unknown = [name for name in self.recompute_modules if name not in known]
        require(not unknown, f"--recompute-modules {' '.join(unknown)} is unknown, allowed are {', '.join(known)}")
        if self.recompute_granularity == "full":
            require(
                self.recompute_method is not None,
                "--recompute-granularity full needs --recompute-method: add uniform or block",
            )
            if self.recompute_num_layers is None:
                require(
                    self.recompute_method == "uniform", "--recompute-method block needs --recompute-num-layers: add it"
                )
                fill(self, "recompute_num_layers", 1)
            require_positive("--recompute-num-layers", self.recompute_num_layers or 0)
        else:
            require(
                self.recompute_method is None,
                f"--recompute-method {self.recompute_method} is for --recompute-granularity full: "
                "add that or drop the method",
            )
