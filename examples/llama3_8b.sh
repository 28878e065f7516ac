#!/bin/bash
# A model of 8B parameters in the shape of Llama-3 (8 query groups, 128256 tokens, sequence 8192).
#   GPUS=4 GPU_GB=80 DATA=my_text_document TOKENIZER=folder SAVE=checkpoints/run examples/llama3_8b.sh [more flags]
# GPUS: of one node, 1, 2, 4 or 8; GPU_GB: 40, 80 or 141. Without DATA it trains on mock data. Under SLURM:
#   sbatch --gpus-per-node=4 --export=ALL,GPU_GB=80 examples/slurm/torchrun.sbatch examples/llama3_8b.sh
# Tests shrink the sizes; a plan below holds for the sizes as they are.
set -euo pipefail
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
NAME=llama3-8b
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}
GPU_GB=${GPU_GB:-80}
SEQ_LENGTH=${SEQ_LENGTH:-8192}
VOCAB_SIZE=${VOCAB_SIZE:-128256}

MODEL=(
    --num-layers "${NUM_LAYERS:-32}" --hidden-size "${HIDDEN_SIZE:-4096}" --ffn-hidden-size "${FFN_HIDDEN_SIZE:-14336}"
    --num-attention-heads "${NUM_HEADS:-32}" --group-query-attention --num-query-groups "${NUM_GROUPS:-8}"
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

# A plan of one's own: give TENSOR, RECOMPUTE (full or none), GRADIENTS (bf16 or fp32) and BUDGET_GIB (GiB or none).
if [ -z "${BUDGET_GIB:-}" ]; then
# begin plans (written by examples/plan_cells.py)
case "$GPUS x $GPU_GB GB" in
"1 x 40 GB")
    IMPOSSIBLE="bf16 weights 15.0 and gradients 15.0 GiB, logits 6.0 GiB and activations exceed the usable 37.0 GiB before any optimizer state; SEQ_LENGTH=2048 would fit, with a plan of one's own"
    ;;
"2 x 40 GB")
    # GPU: 36.5 of 37.0 usable GiB = weights 7.5, gradients 7.5 (bf16), activations
    # 18.5, logits or a layer's largest tensors 3.1, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 15.0 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by cpu).
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"4 x 40 GB")
    # GPU: 36.5 of 37.0 usable GiB = weights 7.5, gradients 7.5 (bf16), activations
    # 18.5, logits or a layer's largest tensors 3.1, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 15.0 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by cpu).
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"8 x 40 GB")
    # GPU: 36.5 of 37.0 usable GiB = weights 7.5, gradients 7.5 (bf16), activations
    # 18.5, logits or a layer's largest tensors 3.1, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 15.0 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by dram).
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"1 x 80 GB")
    # GPU: 72.7 of 75.0 usable GiB = weights 15.0, gradients 15.0 (bf16), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 29.9 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by cpu).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"2 x 80 GB")
    # GPU: 72.7 of 75.0 usable GiB = weights 15.0, gradients 15.0 (bf16), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 29.9 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by cpu).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"4 x 80 GB")
    # GPU: 72.7 of 75.0 usable GiB = weights 15.0, gradients 15.0 (bf16), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 29.9 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by cpu).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"8 x 80 GB")
    # GPU: 72.7 of 75.0 usable GiB = weights 15.0, gradients 15.0 (bf16), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 0.0, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 29.9 GiB.
    # Host: 104.7 GiB of the node, pinned: 0 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 0 % (bound by dram).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=1
    ;;
"1 x 141 GB")
    # GPU: 130.3 of 132.0 usable GiB = weights 15.0, gradients 15.0 (bf16), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 55.1, slots and upcast 2.4.
    # bf16 gradients: fp32 ones would take 29.9 GiB.
    # Host: 24.1 GiB of the node, pinned: 74 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 54 % (bound by cpu).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=58
    ;;
"2 x 141 GB")
    # GPU: 125.0 of 132.0 usable GiB = weights 15.0, gradients 29.9 (fp32), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 37.4, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"4 x 141 GB")
    # GPU: 106.3 of 132.0 usable GiB = weights 15.0, gradients 29.9 (fp32), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 18.7, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"8 x 141 GB")
    # GPU: 97.0 of 132.0 usable GiB = weights 15.0, gradients 29.9 (fp32), activations
    # 36.8, logits or a layer's largest tensors 6.0, optimizer state 9.3, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
*)
    IMPOSSIBLE="there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141"
    ;;
esac
# end plans (written by examples/plan_cells.py)
fi

source "$(dirname "$0")/launch.sh"
