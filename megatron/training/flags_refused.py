"""Flags of Megatron that are refused, each with what to do instead. Standard library only."""

from __future__ import annotations

_EXPERTS = "mixtures of experts are not built here: train a dense model"
_FSDP = "state is sharded by the distributed optimizer here: drop it, or see InterleavedAdamW for FSDP2"
_CONTEXT = "context parallelism is not built here: use --tensor-model-parallel-size with --sequence-parallel"
_LOWER = "8-bit and 4-bit training is not built here: use --bf16"
_MULTI_TOKEN = "multi-token prediction is not built here: drop it"
_SITE = "it is not built here: drop it"
_DEEPSPEED = "DeepSpeed is not used: drop it, and let --interleaved-offload place optimizer state"

REFUSED: dict[str, str] = {
    "--num-experts": _EXPERTS,
    "--multi-latent-attention": "latent attention is not built here: use --group-query-attention",
    "--mtp-num-layers": _MULTI_TOKEN,
    "--use-megatron-fsdp": _FSDP,
    "--use-custom-fsdp": _FSDP,
    "--use-torch-fsdp2": _FSDP,
    "--data-parallel-sharding-strategy": _FSDP,
    "--hybrid-context-parallel": _CONTEXT,
    "--optimizer-offload-policy": (
        "placement is chosen by --offload-gpu-share and --offload-resident-fraction: use those"
    ),
    "--optimizer-offload-auto-threshold": "memory is given by --offload-device-budget-gib: use that",
    "--use-legacy-models": "legacy models were removed from Megatron: drop it",
    # Removed from Megatron itself.
    "--checkpoint-activations": "it was replaced: use --recompute-granularity full --recompute-method uniform",
    "--batch-size": "it was replaced: use --micro-batch-size and --global-batch-size",
    "--warmup": "it was replaced: use --lr-warmup-fraction",
    "--model-parallel-size": "it was replaced: use --tensor-model-parallel-size",
    "--fp8-hybrid": _LOWER,
    "--transformer-pipeline-model-parallel-size": "it was replaced: use --pipeline-model-parallel-size",
    "--pipeline-model-parallel-split-rank": "encoder-decoder models are not built here: drop it",
    "--encoder-num-layers": "a GPT has one stack: use --num-layers",
    "--decoder-num-layers": "a GPT has one stack: use --num-layers",
    "--encoder-seq-length": "a GPT has one sequence: use --seq-length",
    "--decoder-seq-length": "a GPT has one sequence: use --seq-length",
    "--rope-type": "it is chosen by the model: use --position-embedding-type rope",
    # Would change what is computed.
    "--init-method-xavier-uniform": "weights start from a normal distribution: use --init-method-std",
    "--apply-residual-connection-post-layernorm": "residuals come before the norm: drop it",
    "--data-parallel-random-init": "data-parallel ranks must start with equal weights: drop it",
    "--apply-wd-to-qk-layernorm": "norms have no weight decay: drop it",
    "--no-weight-decay-cond-type": "biases and norms, and only they, have no weight decay: drop it",
    "--decrease-batch-size-if-needed": "the batch never shrinks by itself: use a --global-batch-size that divides",
    "--eval-global-batch-size": "evaluation uses the training batch: drop it and scale --eval-iters",
    "--eval-micro-batch-size": "evaluation uses the training batch: drop it and scale --eval-iters",
    "--full-validation": "evaluation takes --eval-iters batches: drop it and set --eval-iters",
    "--multiple-validation-sets": "there is one validation set: give all of them to --valid-data-path",
    "--per-split-data-args-path": "it is not built here: use --train-data-path and --valid-data-path",
    "--spec": "layers are chosen by --transformer-impl: use local or transformer_engine",
    "--yaml-cfg": "settings come from flags only: write them as flags",
    "--non-persistent-save-interval": "it is not built here: use --save-interval with --keep-last",
    "--use-mp-args-from-checkpoint-args": "a checkpoint loads under any layout: give the layout as flags",
    "--quick-geglu": "it is not built here: the MLP is GELU, --swiglu or --squared-relu",
    "--no-rope-freq": "every layer rotates or none does: use --position-embedding-type",
    "--window-attn-skip-freq": "every layer has the same window: drop it",
    "--freeze-all-layers": "it is not built here: use --skip-train to evaluate only",
    # Of Megatron's derivatives.
    "--activations-checkpoint-method": "it was replaced: use --recompute-granularity full --recompute-method uniform",
    "--num-key-value-heads": "it has another name: use --group-query-attention --num-query-groups",
    "--no-pipeline-parallel": "it is --pipeline-model-parallel-size 1, the default: drop it",
    "--tensorboard-log-dir": "it has another name: use --tensorboard-dir",
}

REFUSED_PREFIXES: dict[str, str] = {
    "--deepspeed": _DEEPSPEED,
    "--zero-": _DEEPSPEED,
    "--fp8-": _LOWER,
    "--fp4-": _LOWER,
    "--first-last-layers-bf16": _LOWER,
    "--moe-": _EXPERTS,
    "--mtp-": _MULTI_TOKEN,
    "--megatron-fsdp-": _FSDP,
    "--fsdp-": _FSDP,
    "--torch-fsdp2-": _FSDP,
    "--dsa-": "sparse attention is not built here: drop it",
    "--linear-": "linear attention is not built here: drop it",
    "--experimental-attention-": "other kinds of attention are not built here: drop it",
    "--mamba-": "state-space layers are not built here: train a GPT",
    "--hybrid-": "state-space layers are not built here: train a GPT",
    "--muon-": "the optimizer is Adam: drop it",
    "--lion-": "the optimizer is Adam: drop it",
    "--sgd-": "the optimizer is Adam: drop it",
    "--rl-": "reinforcement learning is not built here: drop it",
    "--grpo-": "reinforcement learning is not built here: drop it",
    "--langrl-": "reinforcement learning is not built here: drop it",
    "--inference-": "inference is not built here: export the model and serve it elsewhere",
    "--retro-": "retrieval models are not built here: train a GPT",
    "--bert-": "only GPT models are built here: drop it",
    "--biencoder-": "only GPT models are built here: drop it",
    "--ict-": "only GPT models are built here: drop it",
    "--vision-": "only GPT models are built here: drop it",
    "--dino-": "only GPT models are built here: drop it",
    "--swin-": "only GPT models are built here: drop it",
    "--img-": "only GPT models are built here: drop it",
    "--fim-": "fill-in-the-middle samples are not built here: prepare them as documents",
    "--use-mup": "width-scaled parametrization is not built here: drop it",
    "--mup-": "width-scaled parametrization is not built here: drop it",
    "--yarn-": "this kind of rope scaling is not built here: use --use-rope-scaling",
    "--mscale": "this kind of rope scaling is not built here: use --use-rope-scaling",
    "--export-": "distillation and export are not built here: drop it",
    "--logits-": "distillation is not built here: drop it",
    "--sft-": "chats are written by the template of the tokenizer: drop it",
    "--cuda-graph": "CUDA graphs are not built here: drop it",
    "--enable-cuda-graph": "CUDA graphs are not built here: drop it",
    "--external-cuda-graph": "CUDA graphs are not built here: drop it",
    "--use-kitchen-": _LOWER,
    "--kitchen-": _LOWER,
    "--gtp-": _SITE,
    "--inprocess-": _SITE,
    "--fault-injector-": _SITE,
    "--heterogeneous-": "all layers are alike here: drop it",
    "--otel-": _SITE,
    "--non-persistent-": "it is not built here: use --save-interval with --keep-last",
    "--replication": _SITE,
    "--ckpt-convert-": "it is not built here: use tools/checkpoint/convert.py",
    "--fine-grained-": "activations stay on the GPU: use --recompute-granularity",
    "--offload-modules": "activations stay on the GPU: use --recompute-granularity",
    "--activation-offload-": "activations stay on the GPU: use --recompute-granularity",
}

# Other flags of Megatron that would change the run: named, so that they are not taken for a misspelling.
_NOT_BUILT = """
    activation-func-clamp-value allow-ambiguous-pad-tokens attention-output-gate batch-invariant-backend
    batch-invariant-mode block-data-path cache-mla-latents chat-template ckpt-drop-redundant-extra-state
    ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group
    ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path classes-fraction
    config-logger-dir data-per-class-fraction dataloader-inter-document-masking
    ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation
    delta-offload-bytes-across-pp-ranks disable-bf16-reduced-precision-matmul
    dump-param-to-param-group-map embedding-init-method-std embedding-path enable-full-sharding-in-hsdp
    enable-mhc-connections evidence-data-path fake-process-group flash-decode fused-residual-rmsnorm glu-linear-offset
    head-lr-mult init-model-with-meta-device is-hybrid-model keep-fp8-transpose-cache kv-lora-rank lazy-mpu-init
    load-main-params-from-ckpt log-max-attention-logit mask-factor mask-prob mask-type max-seqlen-per-dp-cp-rank
    mid-level-dataset-surplus mla-down-proj-fusion mlp-chunks-for-prefill mlp-chunks-for-training mrope-section
    no-data-sharding no-pad-vocab-size null-tokenizer-eod-id null-tokenizer-pad-id num-channels num-classes
    object-storage-cache-path onnx-safe optimizer-cuda-graph outer-dp-sharding-strategy output-bert-embeddings
    output-logit-dtype override-ckpt-iteration patch-dim per-dataset-sequences-path perform-rl-step
    phase-transition-iterations pipeline-model-parallel-layout q-lora-rank qk-clip qk-clip-alpha qk-clip-threshold
    qk-head-dim qk-l2-norm qk-pos-emb-head-dim query-in-block-prob relative-attention-max-distance
    relative-attention-num-buckets result-rejected-tracker-filename reuse-grad-buf-for-mxfp8-param-ag
    rotary-scaling-factor s3-cache-path sample-rate save-activations-interval save-dgrads-interval
    save-params-interval save-wgrads-interval short-seq-prob softmax-type standalone-embedding-stage
    start-eval-at-iter suggested-communication-unit-size symmetric-ar-type te-precision-config-file
    tensor-parallel-num-weight-shards tiktoken-special-tokens titles-data-path tokenizer-metadata
    tokenizer-sentencepiece-legacy tokenizer-special-tokens use-fused-weighted-squared-relu use-gigatoken
    use-nccl-ub use-one-sent-docs use-ring-exchange-p2p use-transformer-engine-op-fuser v-head-dim
    validation-set-names
    cpu-offloading-retain-pinned-cpu-buffers decode-only-cuda-graphs delay-offload-until-cuda-graph
    disable-symmetric-registration enable-chunked-prefill enable-msc
    ep-overlap-early-attn-memory-release exit-signal-handler-for-training expert-tensor-parallel-num-weight-shards
    ft-num-warmup-iters gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
    high-priority-a2a-comm-stream indexer-batch-size indexer-log-interval iter-per-epoch max-tokens-to-oom
    mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
    min-offloaded-tensor-size nccl-all-reduce-for-prefill no-ckpt-load-validate-sharding-integrity
    no-strict-fsdp-dtensor-load no-tokenizer-sentencepiece-ignore-extra-whitespaces no-use-layer-wise-param-layout
    num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-speculative-tokens
    overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm refit-method
    retriever-report-topk-accuracies retriever-score-scaling retriever-seq-length run-workload-inspector-server
    save-tokens-per-expert-interval sharp-enabled-group use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
    use-te-activation-func
"""

NOT_BUILT: frozenset[str] = frozenset(f"--{name}" for name in _NOT_BUILT.split())


def refusal(name: str) -> str | None:
    """Return the sentence that refuses flag `name`, None for flags that are not refused."""
    reason = REFUSED.get(name)
    if reason is None:
        reason = next((text for prefix, text in REFUSED_PREFIXES.items() if name.startswith(prefix)), None)
    negated = next((name[len(word) :] for word in ("--no-", "--disable-") if name.startswith(word)), None)
    if reason is None and negated is not None:  # the switch that turns off what is refused
        reason = next((text for prefix, text in REFUSED_PREFIXES.items() if f"--{negated}".startswith(prefix)), None)
    if reason is None and (name in NOT_BUILT or f"--no-{negated}" in NOT_BUILT):
        reason = "it is not built here: drop it"
    return None if reason is None else f"{name} is refused, {reason}"
