#!/bin/bash
# Qwen2.5 14B with optimizer offload as Megatron spells it; a weighted blend, functions, line continuations.
NNODES=1
NPROC=8

data_args() {
    echo "reading from $1"
    DATA_ARGS=(--data-path 0.6 "$1"/web_text_document 0.3 "$1"/code_text_document 0.1 "$1"/math_text_document)
    DATA_ARGS+=(--split "98,2,0" --data-cache-path "$1"/cache --num-workers 8 --reset-position-ids --eod-mask-loss)
}
data_args /data/qwen

OPTIM_ARGS="--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --overlap-cpu-optimizer-d2h-h2d"
OPTIM_ARGS+=" --use-precision-aware-optimizer"

python -m torch.distributed.run --nproc_per_node $NPROC --nnodes $NNODES --standalone \
    pretrain_gpt.py \
    --num-layers 48 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 \
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 \
    --position-embedding-type rope --rotary-base 1000000 --use-mcore-models \
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --add-qkv-bias \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-14B --padded-vocab-size 152064 \
    --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --seed 42 \
    --lr 2e-5 --min-lr 2e-6 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 2000 \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 \
    --recompute-granularity selective --recompute-modules core_attn mlp --attention-backend flash \
    ${OPTIM_ARGS} "${DATA_ARGS[@]}" \
    --save ckpt --load ckpt --save-interval 200 --log-interval 1 --eval-interval 1000 --eval-iters 5 \
    --log-memory-to-tensorboard --tensorboard-dir tb $EXTRA_ARGS
