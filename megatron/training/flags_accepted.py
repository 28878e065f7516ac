"""Flags of Megatron that set no field here, yet must not stop a launch script. Standard library only.

Each gets one answer at start-up: "accepted, no effect because ...". Flags whose value matters are in `ONLY`.
"""

from __future__ import annotations

# Groups of flags that share a reason: (reason, {flag: number of values}).
_GROUPS: tuple[tuple[str, dict[str, int | str]], ...] = (
    ("megatron-core's models are the only ones here", {"--use-mcore-models": 0}),
    (
        "the local attention lets torch choose its kernel and needs no separate softmax, and TransformerEngine's "
        "chooses by its own NVTE_* variables",
        {"--use-flash-attn": 0, "--no-masked-softmax-fusion": 0, "--flash-attention-version": 1},
    ),
    (
        "elementwise functions are fused where the device and its compiler can, which changes no more than rounding",
        {
            "--no-bias-swiglu-fusion": 0,
            "--no-bias-dropout-fusion": 0,
            "--no-rope-fusion": 0,
            "--use-fused-rmsnorm": 0,
            "--use-fused-swiglu": 0,
            "--use-fused-rotary-pos-emb": 0,
            "--cross-entropy-loss-fusion": 0,
            "--cross-entropy-fusion-impl": 1,
            "--disable-jit-fuser": 0,
        },
    ),
    ("the fused kernels of Apex are not used", {"--no-gradient-accumulation-fusion": 0, "--no-persist-layer-norm": 0}),
    (
        "overlapped tensor-parallel communication is TransformerEngine's, with its defaults",
        {
            "--tp-comm-overlap-cfg": 1,
            "--tp-comm-overlap-rs-dgrad": 0,
            "--tp-comm-bootstrap-backend": 1,
            "--no-tp-comm-bulk-wgrad": 0,
            "--disable-tp-comm-bulk-wgrad": 0,
            "--no-tp-comm-bulk-dgrad": 0,
            "--disable-tp-comm-bulk-dgrad": 0,
            "--no-tp-comm-overlap-ag": 0,
            "--disable-tp-comm-overlap-ag": 0,
            "--no-tp-comm-overlap-rs": 0,
            "--disable-tp-comm-overlap-rs": 0,
            "--no-tp-comm-split-ag": 0,
            "--disable-tp-comm-split-ag": 0,
            "--no-tp-comm-split-rs": 0,
            "--disable-tp-comm-split-rs": 0,
        },
    ),
    ("weights are always initialized before a checkpoint is loaded", {"--no-initialization": 0}),
    ("each device has one kind of random number tracker", {"--te-rng-tracker": 0}),
    ("scores are never scaled by the layer's number unless asked for", {"--no-query-key-layer-scaling": 0}),
    ("samples are full, never padded", {"--max-padding-length": 1}),
    (
        "the embedding's rows follow from the tokenizer and --make-vocab-size-divisible-by (or --padded-vocab-size)",
        {"--extra-vocab-size": 1},
    ),
    ("the loss is computed in fp32", {"--fp16-lm-cross-entropy": 0}),
    (
        "[s, s] masks are built only when --reset-attention-mask needs them",
        {"--no-create-attention-mask-in-dataloader": 0, "--disable-create-attention-mask-in-dataloader": 0},
    ),
    (
        "index caches are always read through memory maps and checked first",
        {"--dataloader-fast-cache-load": 0, "--dataloader-defer-npy-index-mmap": 0},
    ),
    (
        "tokenizers are read from local files by the fast libraries, and code that comes with one is never run",
        {
            "--legacy-tokenizer": 0,
            "--tokenizer-hf-use-fast": 0,
            "--tokenizer-hf-no-use-fast": 0,
            "--tokenizer-hf-no-include-special-tokens": 0,
            "--trust-remote-code": 0,
        },
    ),
    (
        "there are no experts",
        {"--expert-tensor-parallel-size": 1},
    ),
    (
        "context parallelism is off",
        {"--cp-comm-type": "+", "--hierarchical-context-parallel-sizes": "+"},
    ),
    (
        "the optimizer starts each gather as soon as its bucket is in place",
        {"--no-align-param-gather": 0, "--overlap-param-gather-with-optimizer-step": 0, "--delay-param-gather": 0},
    ),
    (
        "gradient buckets are reduced as soon as they are complete",
        {
            "--no-align-grad-reduce": 0,
            "--disable-align-grad-reduce": 0,
            "--no-delay-grad-reduce": 0,
            "--delay-grad-reduce": 0,
        },
    ),
    (
        "optimizer state is sharded over all data-parallel ranks, always",
        {"--num-distributed-optimizer-instances": 1, "--create-all-gather-group": 0},
    ),
    (
        "communication runs with megatron-core's and NCCL's defaults",
        {
            "--ddp-pad-buckets-for-high-nccl-busbw": 0,
            "--disable-gloo-process-groups": 0,
            "--pipeline-model-parallel-comm-backend": 1,
            "--overlap-p2p-communication-warmup-flush": 0,
            "--no-scatter-gather-tensors-in-pipeline": 0,
            "--no-async-tensor-model-parallel-allreduce": 0,
            "--disable-async-tensor-model-parallel-allreduce": 0,
            "--defer-embedding-wgrad-compute": 0,
            "--wgrad-deferral-limit": 1,
            "--delay-wgrad-compute": 0,
            "--no-gradient-reduce-div-fusion": 0,
            "--high-priority-stream-groups": "+",
            "--nccl-communicator-config-path": 1,
            "--distributed-timeout-seconds-after-init": 1,
            "--flight-recorder-dump-path": 1,
            "--flight-recorder-trace-buffer-size": 1,
            "--flight-recorder-include-stack-trace": 0,
            "--no-flight-recorder-dump-on-timeout": 0,
            "--no-flight-recorder-include-only-active": 0,
            "--no-flight-recorder-extra-dump-on-exec": 0,
            "--use-sharp": 0,
            "--DDP-impl": 1,
            "--no-contiguous-buffers-in-local-ddp": 0,
            "--no-clone-scatter-output-in-embedding": 0,
            "--disable-clone-scatter-output-in-embedding": 0,
        },
    ),
    ("data workers leave the signal to the training process", {"--exit-signal-handler-for-dataloader": 0}),
    ("ranks come from the environment", {"--local-rank": 1, "--local_rank": 1}),
    (
        "checkpoints are always distributed ones that load under any layout, whose format is found by itself",
        {
            "--use-dist-ckpt": 0,
            "--auto-detect-ckpt-format": 0,
            "--ckpt-fully-parallel-save": 0,
            "--dist-ckpt-optim-fully-reshardable": 0,
            "--distrib-optim-fully-reshardable-mem-efficient": 0,
            "--dist-ckpt-save-pre-mcore-014": 0,
        },
    ),
    (
        "every save plans anew with its own writers, and files always carry checksums",
        {
            "--use-persistent-ckpt-worker": 0,
            "--ckpt-assume-constant-structure": 0,
            "--async-strategy": 1,
            "--async-ckpt-use-cpu-shm": 0,
            "--async-ckpt-cpu-priority": 1,
            "--async-ckpt-io-priority": 1,
            "--dist-ckpt-workers": 1,
            "--ckpt-fully-parallel-load-exchange-algo": 1,
            "--verify-integrity": 0,
            "--no-save-tokenizer-assets": 0,
            "--disable-save-tokenizer-assets": 0,
        },
    ),
    (
        "batch size, learning rate and loss scale are always drawn",
        {
            "--log-batch-size-to-tensorboard": 0,
            "--log-learning-rate-to-tensorboard": 0,
            "--log-loss-scale-to-tensorboard": 0,
        },
    ),
    (
        "this kind of logging is not built here",
        {
            "--no-log-learnig-rate-to-tensorboard": 0,
            "--no-barrier-with-level-1-timing": 0,
            "--log-memory-interval": 1,
            "--log-device-memory-used": 0,
            "--log-energy": 0,
            "--log-straggler": 0,
            "--disable-straggler-on-startup": 0,
            "--straggler-minmax-count": 1,
            "--straggler-ctrlr-port": 1,
            "--logging-level": 1,
            "--no-one-logger": 0,
            "--enable-one-logger": 0,
            "--one-logger-project": 1,
            "--one-logger-run-name": 1,
            "--one-logger-entity": 1,
            "--one-logger-async": 0,
            "--app-tag-run-name": 1,
            "--app-tag-run-version": 1,
        },
    ),
    (
        "the profiler is always torch's and writes a timeline",
        {
            "--use-pytorch-profiler": 0,
            "--pytorch-profiler-collect-shapes": 0,
            "--pytorch-profiler-collect-callstack": 0,
            "--pytorch-profiler-collect-chakra": 0,
            "--record-shapes": 0,
            "--record-memory-history": 0,
            "--memory-snapshot-path": 1,
            "--nvtx-ranges": 0,
        },
    ),
    (
        "a faulty result stops the run instead of being computed again, and is never injected",
        {
            "--error-injection-rate": 1,
            "--error-injection-type": 1,
            "--check-for-large-grads": 0,
            "--check-weight-hash-across-dp-replicas-interval": 1,
            "--gpu-sniff-test-interval": 1,
            "--train-sync-interval": 1,
        },
    ),
    (
        "it concerns services of one site",
        {"--adlr-autoresume": 0, "--adlr-autoresume-interval": 1, "--enable-ft-package": 0, "--calc-ft-timeouts": 0},
    ),
    ("tests run from tests/", {"--test-mode": 0, "--enable-experimental": 0, "--disable-msc": 0}),
    (
        "optimizer states are fp32 and copies always overlap with updates",
        {
            "--use-precision-aware-optimizer": 0,
            "--overlap-cpu-optimizer-d2h-h2d": 0,
            "--use-torch-optimizer-for-cpu-offload": 0,
        },
    ),
    (
        "host state is pinned where the system allows it, once, when training starts",
        {"--no-pin-cpu-grads": 0, "--no-pin-cpu-params": 0},
    ),
    (
        "activations stay on the GPU: save memory with --recompute-granularity",
        {"--cpu-offloading": 0, "--cpu-offloading-num-layers": 1},
    ),
)

NO_EFFECT: dict[str, tuple[int | str, str]] = {
    flag: (count, reason) for reason, flags in _GROUPS for flag, count in flags.items()
}
"""Flag: (number of values, why it has no effect)."""

_FP32_STATES = "optimizer states are fp32 here: drop the flag"

ONLY: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--attention-backend": (
        ("auto", "flash", "fused", "unfused", "local"),
        "attention lets its library choose the kernel",
        "use one of them or drop the flag",
    ),
    "--data-impl": (("mmap", "infer"), "datasets are .bin/.idx pairs", "convert them with tools/preprocess_data.py"),
    "--dataset": (
        ("MMAP", "LLama-Pretrain-Idxmap"),
        "datasets are .bin/.idx pairs",
        "prepare the data with tools/preprocess_data.py and drop the flag",
    ),
    "--train-mode": (("pretrain",), "it is the only mode here", "fine-tuning on chats is not built here"),
    "--dist-ckpt-format": (("torch_dist",), "it is the only format written here", "drop the flag"),
    "--expert-model-parallel-size": (("1",), "there are no experts", "experts are not built here, drop the flag"),
    "--vocab-extra-ids": (("0",), "no ids are added", "drop the flag"),
    "--main-params-dtype": (("fp32",), "it is the type of master weights here", _FP32_STATES),
    "--exp-avg-dtype": (("fp32",), "it is the type of moments here", _FP32_STATES),
    "--exp-avg-sq-dtype": (("fp32",), "it is the type of moments here", _FP32_STATES),
}
"""Flag with one value: (values that change nothing, why, what to do about other values)."""

MAPPED: dict[str, tuple[int | str, str]] = {
    "--use-rotary-position-embeddings": (0, "sets --position-embedding-type rope"),
    "--no-position-embedding": (0, "checks that --position-embedding-type is rope or none"),
    "--recompute-activations": (0, "sets --recompute-granularity selective"),
    "--optimizer-cpu-offload": (0, "sets --interleaved-offload --offload-gpu-share 0 and the resident fraction"),
    "--optimizer-offload-fraction": (1, "F sets --offload-resident-fraction 1-F, with --optimizer-cpu-offload"),
    "--main-grads-dtype": (1, "bf16 sets --grad-reduce-in-bf16"),
    "--patch-tokenizer-type": (1, "sets --tokenizer-type HuggingFaceTokenizer, read from --load"),
    "--tokenizer-name-or-path": (1, "sets --tokenizer-model"),
    "--no-use-tokenizer-model-from-checkpoint-args": (0, "keeps --tokenizer-model with --use-checkpoint-args"),
}
"""Flag that sets other flags: (number of values, what it does). `flags_rules.py` does it."""

_OWN_PLAN = "every rank always writes and reads its own part, and nothing twice"

NOT_YET: dict[str, str] = {
    "dist_ckpt_strictness": "missing keys always stop a load and further keys are always ignored",
    "ckpt_fully_parallel_save": _OWN_PLAN,
    "ckpt_fully_parallel_load": _OWN_PLAN,
}
"""Field that no code reads yet: why giving it has no effect. A test keeps this list true; building one removes it."""
