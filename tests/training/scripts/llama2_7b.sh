#!/bin/bash
# Llama-2 7B on one node: bash arrays, sizes at the top.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
DATA=${1:?prefix of the tokenized corpus}
TOKENIZER=${2:-/models/llama2/tokenizer.model}
OUT=${3:-runs/llama2-7b}

TP=2
SEQ=4096

LAUNCH=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --rdzv_backend c10d
    --rdzv_endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29400}"
)

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length $SEQ
    --max-position-embeddings $SEQ
    --position-embedding-type rope
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0   # Llama trains without dropout
    --hidden-dropout 0.0
    --init-method-std 0.01
    --use-flash-attn
)

TRAIN=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 250000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 250000
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --use-mcore-models
)

PARALLEL=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

IO=(
    --data-path "$DATA"
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER"
    --split 990,9,1
    --save "$OUT/ckpt"
    --load "$OUT/ckpt"
    --save-interval 1000
    --eval-interval 500
    --eval-iters 20
    --log-interval 10
    --log-throughput
    --tensorboard-dir "$OUT/tb"
)

torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" "${TRAIN[@]}" "${PARALLEL[@]}" "${IO[@]}" 2>&1 | tee "$OUT/log.txt"
