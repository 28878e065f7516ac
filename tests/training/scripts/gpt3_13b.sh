#!/bin/sh
# GPT-3 13B in fp16, old style: one call, vocabulary files, ramp-up of the batch.
DIR=`pwd`
DATETIME=`date +'%y-%m-%d_%H-%M-%S'`
mkdir -p $DIR/logs

OPTIONS=" \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 2 \
    --num-layers 40 \
    --hidden-size 5120 \
    --num-attention-heads 40 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 2 \
    --global-batch-size 512 \
    --rampup-batch-size 32 32 5000000 \
    --train-samples 146484375 \
    --lr-decay-samples 126953125 \
    --lr-warmup-samples 183105 \
    --lr 1.0e-4 \
    --min-lr 1.0e-5 \
    --lr-decay-style cosine \
    --clip-grad 1.0 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --init-method-std 0.008 \
    --fp16 --loss-scale 0 \
    --log-interval 10 \
    --eval-iters 50 \
    --eval-interval 500 \
    --data-impl mmap \
    --data-path $DIR/data/pile_text_document \
    --vocab-file $DIR/gpt2-vocab.json \
    --merge-file $DIR/gpt2-merges.txt \
    --split 949,50,1 \
    --distributed-backend nccl \
    --save-interval 1000 \
    --save $DIR/ckpt \
    --load $DIR/ckpt \
    --recompute-activations \
    --no-query-key-layer-scaling \
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard \
    --tensorboard-dir $DIR/tb"
OPTIONS=$(echo $OPTIONS)

run_cmd="python3 -u ${DIR}/pretrain_gpt.py $@ ${OPTIONS}"
srun -l --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"
