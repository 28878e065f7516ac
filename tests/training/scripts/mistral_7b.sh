#!/usr/bin/env bash
# Mistral 7B, continued from converted weights: options built up step by step, `eval` at the end.
MODEL_SIZE=7B
PR=bf16
AC=full
FL=true
TRAIN_ITERS=5000
WARMUP_ITERS=$(( TRAIN_ITERS / 100 ))

if [ "$MODEL_SIZE" = 7B ]; then
    LAYERS=32; HIDDEN=4096; HEADS=32; FFN=14336
elif [ "$MODEL_SIZE" = 12B ]; then
    LAYERS=40; HIDDEN=5120; HEADS=32; FFN=14336
fi

case $PR in
    fp16) pr_options="--fp16 --initial-loss-scale 65536" ;;
    bf16) pr_options="--bf16" ;;
esac

ac_options=""
if [[ $AC == full ]]; then
    ac_options="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
elif [[ $AC == sel ]]; then
    ac_options="--recompute-activations"
fi

[ "$FL" = true ] && flash_options="--use-flash-attn" || flash_options=""

if [ -n "$WANDB_API_KEY" ]; then
    log_options="--wandb-project mistral --wandb-exp-name cpt"
fi

cmd="torchrun --nproc_per_node 8 --nnodes 1 --master_port 6000 pretrain_gpt.py
  --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --ffn-hidden-size $FFN
  --group-query-attention --num-query-groups 8 --kv-channels 128
  --seq-length 8192 --max-position-embeddings 32768
  --use-rotary-position-embeddings --no-position-embedding --no-rope-fusion --rotary-base 10000 --window-size 4095,0
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
  --micro-batch-size 1 --global-batch-size 128 --train-iters $TRAIN_ITERS
  --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters $WARMUP_ITERS
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
  --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
  --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
  --finetune --no-load-optim --no-load-rng --load $1 --save $2 --save-interval 500 --exit-on-missing-checkpoint
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model $1 --train-data-path $3 --valid-data-path $4
  --eval-interval 250 --eval-iters 10 --log-interval 1 --log-params-norm --log-num-zeros-in-grad
  $pr_options $ac_options $flash_options $log_options"
echo "$cmd"
eval $cmd
