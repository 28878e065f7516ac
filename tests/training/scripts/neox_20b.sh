#!/bin/bash
# A 20B in the shape of GPT-NeoX: partial rotary, LayerNorm, GELU, biases; step schedule of the batch.
MP=8
GPT_ARGS=(
    --num-layers 44 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type rope --rotary-percent 0.25 --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 256 --attention-dropout 0 --hidden-dropout 0
    --no-bias-gelu-fusion --no-bias-dropout-fusion
)
for flag in use-distributed-optimizer overlap-grad-reduce bf16 grad-reduce-in-bf16 deterministic-mode; do
    GPT_ARGS+=("--$flag")
done
SCHEDULE_ARGS=(
    --micro-batch-size 4
    --global-batch-size 1536
    --step-batch-size-schedule "0:512 4B:1024 12B:1536"
    --train-iters 150000 --lr-decay-iters 150000 --lr-warmup-fraction .01
    --lr 9.7e-5 --min-lr 9.7e-6 --lr-decay-style cosine --weight-decay 0.01 --adam-beta2 0.95 --adam-eps 1e-8
)
DATA_ARGS=(
    --data-path ${DATA_PATH} --tokenizer-type HuggingFaceTokenizer --tokenizer-model ./20B_tokenizer
    --split 995,4,1 --save out --save-interval 500 --load out --eval-interval 1000 --eval-iters 10
    --timing-log-level 1 --log-timers-to-tensorboard --tensorboard-dir out/tb --tensorboard-queue-size 5
)
torchrun --nproc-per-node=8 --nnodes=${NNODES:-1} pretrain_gpt.py ${GPT_ARGS[@]} \
    ${SCHEDULE_ARGS[@]} ${DATA_ARGS[@]} --tensor-model-parallel-size ${MP} --interleaved-offload \
    --offload-gpu-share auto --offload-resident-fraction 0 --offload-host-budget-gib 400
