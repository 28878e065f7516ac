# Sourced by the model scripts of this folder, which set the model's shape and the plan of this machine (see there).
if [ -n "${IMPOSSIBLE:-}" ]; then
    echo "$NAME on $GPUS GPU(s) of $GPU_GB GB does not work: $IMPOSSIBLE" >&2
    exit 2
fi

# Variables that a user may set, with their defaults:
SAVE=${SAVE:-$PWD/checkpoints/$NAME}                # checkpoints, and SAVE/status, which the sbatch scripts read
DATA=${DATA:-mock}                              # --data-path, such as "0.7 web_text_document 0.3 code_text_document"
TOKENIZER=${TOKENIZER:-}                        # folder with a tokenizer.json; needed unless DATA=mock
TRAIN_ITERS=${TRAIN_ITERS:-10000}
NUM_NODES=${NUM_NODES:-${SLURM_JOB_NUM_NODES:-1}}
GLOBAL_BATCH=${GLOBAL_BATCH:-$((64 * NUM_NODES))}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
START=${START:-torchrun}                        # torchrun: one launcher a node; srun: SLURM starts a task for each GPU
PYTHON=${PYTHON:-python}
EXIT_SIGNAL=${EXIT_SIGNAL:-SIGUSR1}             # what asks for a checkpoint and an end; `#SBATCH --signal` sends it

TRAIN=(
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_ITERS"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --attention-dropout 0 --hidden-dropout 0 --bf16
)

# Tensor parallelism stays inside a node. Gradients are reduced while the backward pass runs, and parameters gathered
# while the forward pass runs: the optimizer hands over each bucket as soon as it is updated.
PARALLEL=(--tensor-model-parallel-size "$TENSOR" --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
if [ "$TENSOR" -gt 1 ]; then
    PARALLEL+=(--sequence-parallel)
    export CUDA_DEVICE_MAX_CONNECTIONS=1
fi

# bf16 gradients take 2 bytes a parameter on the GPU and on the way to the host instead of 4. They are summed over
# micro-batches in that type: keep GLOBAL_BATCH / data-parallel ranks below about 64, or choose fp32 where it fits.
if [ "$GRADIENTS" = bf16 ]; then
    PARALLEL+=(--grad-reduce-in-bf16)
fi

if [ "$RECOMPUTE" = full ]; then
    PARALLEL+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
fi

OFFLOAD=()
if [ "$BUDGET_GIB" != none ]; then
    OFFLOAD=(
        # Adam's 12 bytes a parameter live in host memory; CPU and GPU update them at the same time.
        --interleaved-offload
        # What weights, gradients and activations leave of a GPU, less 1 GiB: staging slots, and as much state as fits
        # beside them and never travels. Raise it when the log's peak shows room, lower it after an out-of-memory error.
        --offload-device-budget-gib "$BUDGET_GIB"
        # Whatever fits into the budget stays on the GPU.
        --offload-resident-fraction auto
        # The GPU's part of the update: from rates that are measured at start with all ranks at work.
        --offload-gpu-share auto
        # bf16 weights are the upper halves of their masters, so streamed subgroups move 10 bytes each way, not 12.
        --offload-split-master auto
        # bf16 over the link where the CPU converts it faster than the link carries fp32; the bits are the same.
        --offload-grad-wire auto
        # Four slots keep both directions of the link and the GPU busy at once; each takes one subgroup's state. More are
        # for runs in which nothing may stay on the GPU: a resident subgroup is worth more than a slot.
        --offload-num-slots auto
    )
fi

INPUT=(--split 990,8,2 --num-workers 2)
if [ "$DATA" = mock ]; then
    INPUT+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$((VOCAB_SIZE - 1))") # and its end-of-document id
else
    # Not quoted: several weights and prefixes are several words.
    INPUT+=(--data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi

OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL"
    --exit-signal-handler --exit-signal "$EXIT_SIGNAL"
    --log-interval 1 --log-throughput --log-progress --eval-interval 1000 --eval-iters 10
    --distributed-timeout-minutes 30
)

# SLURM signals every process of a step. It would end torchrun, and ranks that still import: so tasks ignore it at
# first (an ignored signal stays ignored in programs that are started later), and training sets a handler of its own.
# The trap stands inside the task, because SLURM gives tasks fresh signal handlers.
export EXIT_SIGNAL

ARGUMENTS=("${MODEL[@]}" "${TRAIN[@]}" "${PARALLEL[@]}" "${OFFLOAD[@]}" "${INPUT[@]}" "${OUTPUT[@]}")
# Or an entry point of your own that calls it. Nothing changes the folder: relative paths are the caller's.
PROGRAM=${PROGRAM:-$REPOSITORY/pretrain_gpt.py}

if [ -n "${LAUNCHER:-}" ]; then
    $LAUNCHER "$PROGRAM" "${ARGUMENTS[@]}" "$@"
elif [ "$START" = srun ]; then
    # Rank and world size come from SLURM's own variables. --kill-on-bad-exit: one dead rank ends all.
    srun --ntasks="$((NUM_NODES * GPUS))" --ntasks-per-node="$GPUS" --kill-on-bad-exit=1 \
        bash -c 'trap "" "${EXIT_SIGNAL#SIG}"; exec "$@"' task "$PYTHON" "$PROGRAM" "${ARGUMENTS[@]}" "$@"
elif [ -n "${SLURM_JOB_ID:-}" ]; then
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    # One task a node: in it SLURM_NODEID is the node's number, and torchrun gives the ranks.
    srun --ntasks="$NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
        trap "" "${EXIT_SIGNAL#SIG}"
        python=$1 nodes=$2 gpus=$3; shift 3
        exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc_per_node "$gpus" \
            --node_rank "$SLURM_NODEID" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"
    ' torchrun "$PYTHON" "$NUM_NODES" "$GPUS" "$PROGRAM" "${ARGUMENTS[@]}" "$@"
elif [ "$NUM_NODES" -gt 1 ]; then
    # Without SLURM: run this on every node, with NODE_RANK 0, 1, ... and MASTER_ADDR of node 0.
    "$PYTHON" -m torch.distributed.run --nnodes "$NUM_NODES" --nproc_per_node "$GPUS" --node_rank "$NODE_RANK" \
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$PROGRAM" "${ARGUMENTS[@]}" "$@"
else
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" "$PROGRAM" "${ARGUMENTS[@]}" "$@"
fi
