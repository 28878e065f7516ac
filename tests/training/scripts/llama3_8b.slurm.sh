#!/bin/bash
#SBATCH --job-name=llama3-8b
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --signal=USR1@600
# Llama-3 8B under SLURM: one torchrun a node, flags in strings, sample-based schedule.

SEQ_LEN=8192
TOKENS=15000000000000
TRAIN_SAMPLES=$((TOKENS / SEQ_LEN))
WARMUP_SAMPLES=$(( 8000 * 1024 ))
DECAY_SAMPLES=$((TRAIN_SAMPLES - WARMUP_SAMPLES))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

model_args=" \
  --use-mcore-models --transformer-impl transformer_engine \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} \
  --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 \
  --use-rope-scaling --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 128 \
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02"

train_args="--micro-batch-size 1 --global-batch-size 1024 \
  --train-samples $TRAIN_SAMPLES --lr-decay-samples $DECAY_SAMPLES --lr-warmup-samples $WARMUP_SAMPLES \
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --manual-gc --manual-gc-interval 100"

parallel_args="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
  --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --context-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

io_args="--data-args-path data/blend.txt --data-cache-path /scratch/cache --split 99,1,0 --num-workers 4 \
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B \
  --save $SCRATCH/llama3 --load $SCRATCH/llama3 --save-interval 500 --ckpt-format torch_dist --async-save \
  --dist-ckpt-strictness log_all --exit-signal-handler --exit-signal SIGUSR1 --exit-duration-in-mins 230 \
  --log-interval 5 --eval-interval 1000 --eval-iters 32 --distributed-timeout-minutes 30 --log-throughput \
  --wandb-project pretraining --wandb-exp-name llama3-8b"

srun --ntasks-per-node=1 bash -c "torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --node_rank=\$SLURM_NODEID \
  --master_addr=$HEAD --master_port=29500 pretrain_gpt.py $model_args $train_args $parallel_args $io_args"
